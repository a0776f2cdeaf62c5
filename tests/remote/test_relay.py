"""A relay gets one answer of the planner for its node, so the planner's work does not grow with the ranks."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.exceptions

from bytescale.common.arrays import IntArray
from bytescale.common.errors import LoaderFailure, PlanError
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.order.batches import make_sampler
from bytescale.data.remote.client import DataService, RemoteLoader
from bytescale.data.remote.messages import PartOwners, PlannedStep, RankStep, StepReference, StillReading
from bytescale.data.remote.relay import FAN_OUT, Answer, Relay, above, part_of
from tests.remote.support import numbered_config, planner_for, write_numbered_corpus


def state(step: int) -> dict[str, Any]:
    return {"step": step}


class Method:
    """What ``actor.method`` is: something with ``remote``."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Above:
    """A planner that answers at once, and counts."""

    def __init__(self) -> None:
        self.life = "first"
        self.told: list[Any] = []
        self.asked: list[tuple[int, str]] = []
        self.plan = Method(self._plan)
        self.configure = Method(self._configure)

    async def _plan(self, state: dict[str, Any], costs: Any, lost: str) -> StepReference | None:
        await asyncio.sleep(0)
        self.asked.append((state["step"], lost))
        if not self.told:
            return None
        if state["step"] == 13:
            raise PlanError("no plan for 13")
        after = {"step": state["step"] + 1}
        return StepReference(planned=None, state_before=state, state_after=after, life=self.life, costs=costs)

    async def _configure(self, *how: Any) -> None:
        self.told.append(how)


def test_every_relay_is_below_the_planner_and_none_has_more_than_its_share() -> None:
    for num_nodes in (1, 64, 2048, 16384):
        below = Counter(above(node) for node in range(num_nodes))
        assert max(below.values()) <= FAN_OUT
        for node in range(num_nodes):
            hops = 0
            at: int | None = node
            while at is not None:
                at = above(at)
                hops += 1
            assert hops <= 3
    assert below[None] == FAN_OUT


def test_ranks_of_a_node_share_one_request() -> None:
    async def check() -> None:
        planner = Above()
        relay = Relay(lambda: planner, kept_steps=2)
        assert await relay.plan(state(0)) is None, "nobody has said how to plan"
        await relay.configure("how", 9)
        planner.asked.clear()
        answers = await asyncio.gather(*(relay.plan(state(0)) for _ in range(8)))
        assert planner.told == [("how", 9)]
        assert planner.asked == [(0, ""), (0, "")]  # not configured, then the answer
        assert all(answer == answers[0] for answer in answers)
        for step in range(1, 6):
            await relay.plan(state(step))
        planner.asked.clear()
        await relay.plan(state(5))
        assert planner.asked == []
        await relay.plan(state(0))  # long forgotten: asked again
        assert planner.asked == [(0, "")]

    asyncio.run(check())


def test_a_step_that_is_asked_for_with_other_costs_is_planned_again() -> None:
    async def check() -> None:
        planner = Above()
        relay = Relay(lambda: planner, kept_steps=2)
        await relay.configure("how", None)
        for costs in ("slow", "slow", "fast"):
            answer = await relay.plan(state(0), costs)
            assert isinstance(answer, StepReference)
            assert answer.costs == costs
        assert len(planner.asked) == 3, "not configured, slow once, and fast"

    asyncio.run(check())


def test_a_planner_that_died_is_told_again_and_its_objects_are_asked_for_again() -> None:
    async def check() -> None:
        planner = Above()
        relay = Relay(lambda: planner, kept_steps=2)
        await relay.configure("how", None)
        first = await relay.plan(state(0))
        assert first is not None
        planner.life = "second"
        planner.told.clear()
        again = await asyncio.gather(*(relay.plan(state(0), None, "first") for _ in range(3)))
        assert {answer.life for answer in again if answer} == {"second"}
        assert planner.told == [("how", None)]

    asyncio.run(check())


def test_while_servers_read_every_level_of_relays_says_so_in_time() -> None:
    """Who joins a request that is on its way gets its answer, and does not wait for another one behind it."""
    requests: list[dict[str, Any]] = []

    class Reading(Above):
        async def _plan(self, state: dict[str, Any], costs: Any, lost: str) -> Any:
            requests.append(state)
            await everybody_asked.wait()
            return StillReading(3)

    async def check() -> None:
        reading = Reading()
        above = Relay(lambda: reading, kept_steps=2)
        tops = {"plan": Method(above.plan), "configure": Method(above.configure)}
        below = [Relay(lambda: type("Handle", (), tops), kept_steps=2) for _ in range(3)]
        for relay in (above, *below):
            await relay.configure("how", None)

        answers = [asyncio.create_task(below[number % 3].plan(state(0))) for number in range(9)]
        while not requests:
            await asyncio.sleep(0)
        everybody_asked.set()
        assert await asyncio.gather(*answers) == [StillReading(3)] * 9
        assert len(requests) == 1

    everybody_asked = asyncio.Event()
    asyncio.run(check())


def test_an_error_reaches_all_who_asked_and_is_not_kept() -> None:
    async def check() -> None:
        planner = Above()
        relay = Relay(lambda: planner, kept_steps=2)
        await relay.configure("how", None)
        outcomes = await asyncio.gather(*(relay.plan(state(13)) for _ in range(3)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [PlanError] * 3
        asked = len(planner.asked)
        with pytest.raises(PlanError, match="no plan for 13"):
            await relay.plan(state(13))
        assert len(planner.asked) == asked + 1

    asyncio.run(check())


def test_a_part_whose_object_was_lost_is_cut_from_what_the_next_planner_made(tmp_path: Path) -> None:
    """The object goes with the planner that had made it; while servers still read, that is the answer."""
    write_numbered_corpus(tmp_path / "numbers")
    config = numbered_config(tmp_path)
    corpus = prepare_corpus(config)
    batch = make_sampler(corpus.index, config).next_batch()
    plan = planner_for(3)(batch.lengths)
    owners = PartOwners(1, np.zeros(1, dtype=np.bool_))
    planned = PlannedStep.of(batch, plan, corpus.index, owners, {"step": 1}, 0.0)

    async def lost_object() -> PlannedStep:
        raise ray.exceptions.OwnerDiedError("ab" * 28, None, "")

    async def found_object() -> PlannedStep:
        return planned

    asked: list[str] = []

    async def ask(state: dict[str, Any], costs: Any, lost: str) -> Answer:
        asked.append(lost)
        life, there = ("second", found_object()) if lost else ("first", lost_object())
        return StepReference(planned=there, state_before=state, state_after={"step": 1}, life=life)

    part = asyncio.run(part_of(ask, 2, state(0), None))
    assert isinstance(part, RankStep)
    assert (part.life, part.rank_plan.rank, asked) == ("second", 2, ["", "first"])

    async def reading(state: dict[str, Any], costs: Any, lost: str) -> Answer:
        return StillReading(7)

    assert asyncio.run(part_of(reading, 2, state(0), None)) == StillReading(7)


@pytest.mark.parametrize("num_ranks", [1, 7, 64])
def test_what_is_cut_for_ranks_from_the_shared_object_is_what_the_local_loader_reads(
    tmp_path: Path, num_ranks: int
) -> None:
    """Every rank's segments, found through the object alone, against the corpus's own index."""
    write_numbered_corpus(tmp_path / "numbers")
    config = numbered_config(tmp_path)
    corpus = prepare_corpus(config)
    batch = make_sampler(corpus.index, config).next_batch()
    plan = planner_for(num_ranks)(batch.lengths)
    owners = PartOwners(3, np.zeros(1, dtype=np.bool_))
    planned = PlannedStep.of(batch, plan, corpus.index, owners, {"step": 1}, 0.0)
    seen: list[IntArray] = []
    for rank in range(num_ranks):
        part = RankStep.of(planned, rank, StepReference(planned=None, state_before={}, state_after={}, life="first"))
        assert part.rank_plan.digest == plan.digest()
        assert (part.plan is None) == (rank > 0)
        table = part.segments
        for place, count, piece, labels in zip(table.places, table.counts, table.pieces, table.num_labels, strict=True):
            tokens = np.arange(place, place + count)  # of a numbered corpus: token ids are places
            assert np.array_equal(corpus.parts[0][place : place + count], tokens)
            last = corpus.pieces.start[piece] + corpus.pieces.num_targets[piece]
            assert labels == np.count_nonzero(tokens < last)
            seen.append(tokens)
    wanted = [
        np.arange(start, start + length)
        for start, length in zip(corpus.pieces.start[batch.pieces], batch.lengths, strict=True)
    ]
    assert np.array_equal(np.sort(np.concatenate(seen)), np.sort(np.concatenate(wanted)))


def test_a_planner_that_never_stays_is_given_up(ray_joined: str, tmp_path: Path) -> None:
    """It forgets what it was told each time, as one would that dies again and again."""

    class Forgetful:
        def part(self, rank: int, state: dict[str, Any], costs: Any) -> None:
            return None

        def configure(self, planner: Any, stop_step: int | None) -> None:
            pass

    actor = ray.remote(Forgetful).options(num_cpus=0).remote()
    service = DataService(relay=actor, servers=[], answer_seconds=1.0)
    settings = {"planner": None, "rank": 0, "state": state(0), "stop_step": 1, "prefetch_steps": 1}
    with (
        RemoteLoader(service, **settings) as loader,
        pytest.raises(LoaderFailure, match=r"planner actor did not answer within 1 s.*raise data.answer_seconds"),
    ):
        next(loader)
    ray.kill(actor)
