"""The planner of a node: what it plans when and how often, and what it cuts for each rank."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from bytescale.common.arrays import IntArray
from bytescale.common.errors import LoaderFailure, PlanError
from bytescale.data.loading.corpus import Corpus, plan_shards, prepare_corpus
from bytescale.data.loading.loader import PlannedStep
from bytescale.data.order.batches import BatchSampler
from bytescale.data.remote.planner_actor import PlannerActor
from bytescale.data.remote.remote_feed import RemoteFeed
from bytescale.plan import Plan
from tests.remote.support import numbered_config, planner_for, write_numbered_corpus


class AtHand:
    """``Shared`` without Ray."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def get(self) -> Any:
        return self.content


class Planning:
    """A planner for three ranks that counts its calls, and fails as long as it is told to."""

    def __init__(self) -> None:
        self.planner = planner_for(3)
        self.calls = 0
        self.fails = False

    def __call__(self, lengths: IntArray) -> Plan:
        self.calls += 1
        if self.fails:
            raise PlanError("no plan today")
        return self.planner(lengths)

    def knows(self, step: int) -> bool:
        return True

    def costs_of(self, step: int) -> Any:
        return None

    def plan_with(self, lengths: IntArray, costs: Any) -> Plan:
        return self(lengths)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    write_numbered_corpus(tmp_path / "numbers")
    return prepare_corpus(numbered_config(tmp_path))


@pytest.fixture
def actor(tmp_path: Path, corpus: Corpus) -> PlannerActor:
    """In this process, with an index that needs no servers."""
    config = numbered_config(tmp_path, prefetch_steps=2)
    work: Any = AtHand(plan_shards(config))
    made = PlannerActor(config, work, [None], ["this node"])
    made._made_index = corpus.index
    return made


def test_ranks_of_a_node_share_one_plan(actor: PlannerActor) -> None:
    planning, state = Planning(), actor.check_state(None)
    how: Any = AtHand(planning)
    with ThreadPoolExecutor(3) as ranks:
        answers = list(ranks.map(lambda rank: actor.part(rank, state, None, how), range(3)))
    assert len({data.rank_plan.digest for data, _, _ in answers}) == 1
    assert [data.rank_plan.rank for data, _, _ in answers] == [0, 1, 2]
    assert [data.plan is None for data, _, _ in answers] == [False, True, True]
    assert planning.calls == 1
    for step in range(9):
        for rank in (1, 2):
            data, _, _ = actor.part(rank, state, None, how)
        state = data.sampler_state_after
        assert planning.calls == step + 1, "nothing is planned twice"
    actor.part(0, actor.check_state(None), None, how)
    assert planning.calls == 10, "steps that no rank can ask for any more are forgotten"


def test_a_step_that_is_asked_for_with_other_costs_is_planned_again(actor: PlannerActor) -> None:
    planning, state = Planning(), actor.check_state(None)
    how: Any = AtHand(planning)
    for costs in ("slow", "slow", "fast"):
        actor.part(0, state, costs, how)
    assert planning.calls == 2, "slow once, and fast once"


def test_an_error_reaches_all_who_ask_and_is_not_kept(actor: PlannerActor) -> None:
    planning, state = Planning(), actor.check_state(None)
    how: Any = AtHand(planning)
    planning.fails = True
    for rank in range(3):
        with pytest.raises(PlanError, match="no plan today"):
            actor.part(rank, state, None, how)
    planning.fails = False
    assert actor.part(0, state, None, how)[0].step == 0


@pytest.mark.parametrize("num_ranks", [1, 7, 64])
def test_what_is_cut_for_ranks_is_the_batch_once(tmp_path: Path, corpus: Corpus, num_ranks: int) -> None:
    """Every rank's segments against the corpus's own index."""
    sampler = BatchSampler(corpus.index, numbered_config(tmp_path))
    planned = PlannedStep.draw(sampler, planner_for(num_ranks), None, "token")
    seen: list[IntArray] = []
    for rank in range(num_ranks):
        data, table = planned.part_of(rank)
        assert data.rank_plan.digest == planned.plan.digest()
        for place, count, sample, labels in zip(
            table.places, table.counts, table.samples, table.num_labels, strict=True
        ):
            tokens = np.arange(place, place + count)  # of a numbered corpus: token ids are places
            assert np.array_equal(corpus.parts[0][place : place + count], tokens)
            last = corpus.samples.start[sample] + corpus.samples.num_targets[sample]
            assert labels == np.count_nonzero(tokens < last)
            seen.append(tokens)
    batch = planned.batch
    wanted = [
        np.arange(start, start + length) for start, length in zip(batch.samples.start, batch.lengths, strict=True)
    ]
    assert np.array_equal(np.sort(np.concatenate(seen)), np.sort(np.concatenate(wanted)))


def test_a_planner_that_answers_nothing_is_given_up(ray_joined: str, tmp_path: Path, corpus: Corpus) -> None:
    class Silent:
        def part(self, *_: Any) -> None:
            time.sleep(60)

        def num_waiting(self) -> int:
            return 0

    feed = RemoteFeed(numbered_config(tmp_path, answer_seconds=1.0), "silent", 0, 1)
    try:
        feed.state_dict()
        actor: Any = ray.remote(Silent)
        feed.planner = actor.options(num_cpus=0, max_concurrency=4).remote()
        message = r"planner actor did not answer within 1 s.*raise data.answer_seconds"
        with feed.open(planner_for(1), 1) as steps, pytest.raises(LoaderFailure, match=message):
            next(steps)
        ray.kill(feed.planner)
    finally:
        feed.close()
