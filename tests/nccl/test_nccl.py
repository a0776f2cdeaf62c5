"""Every step that the real executor posts ends under NCCL's rules, and the replay finds planted faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from torch import Tensor

from bytescale.attention import Exchange
from bytescale.attention.rings.exchange import Message
from bytescale.config.schema import PlannerConfig
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan import Plan, SharedGroup
from bytescale.plan.last_message import last_backward_is_silent
from bytescale.plan.plan import GroupSpec
from bytescale.plan.verify import verify
from bytescale.planner.adaptive.aligned import align
from bytescale.planner.make import make_planner
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.pipeline import StageLinks
from tests.helpers.effort import examples
from tests.helpers.plans import random_plan
from tests.nccl.recorder import Event, Post, record
from tests.nccl.replay import ALL_RULES, EVERYTHING, STREAMS_ONLY, Mismatch, Replay, Rules
from tests.nccl.steps import training_step, uneven

NO_SHRINKING = (Phase.explicit, Phase.generate)  # it would take minutes
COST = CostModel.from_work(linear_per_square=40)


def plan_of(planner: str, lengths: list[int], mesh: MeshShape, *, seed: int = 0) -> Plan:
    """A verified plan, of a planner or drawn at random."""
    room = sum(lengths) if planner == "random" else -(-max(lengths) // mesh.hdp) + seed % 8
    cluster = Cluster.uniform(mesh.hdp, room)
    if planner == "random":
        plan = random_plan(lengths, mesh.hdp, seed)
        plan = align(plan, cluster=cluster, cost=COST) if mesh.pp > 1 else plan
    else:
        config = PlannerConfig(name=planner)  # type: ignore[arg-type]
        plan = make_planner(config, cluster, COST, num_stages=mesh.pp)(lengths)
    verify(plan, num_stages=mesh.pp)
    return plan


def recorded(plan: Plan, mesh: MeshShape, *, ranks_per_node: int = 0, **options: object) -> list[list[Event]]:
    """All ranks' programs of a step over two layers a stage.

    ``ranks_per_node``: 0: all on one. ``bucket_bytes``: of two steps whose gradients are reduced while ranks compute.
    """
    step = training_step(plan, 2 * mesh.pp, **options)  # type: ignore[arg-type]
    nodes = [rank // ranks_per_node for rank in range(mesh.size)] if ranks_per_node else None
    return record(mesh, step, overlapped="bucket_bytes" in options, nodes=nodes)


def assert_finishes(programs: list[list[Event]]) -> None:
    """Under every rule: what ends although everything is waited for ends under fewer waits too."""
    if Replay(programs, EVERYTHING).run():
        for rules in ALL_RULES:
            stuck = Replay(programs, rules).run()
            assert not stuck, f"{rules}:\n" + "\n".join(stuck)


@examples(3, 24, phases=NO_SHRINKING)
@given(
    planner=st.sampled_from(["static", "naive", "paper", "adaptive", "random"]),
    mesh=st.sampled_from(
        [
            *(MeshShape(hdp=hdp) for hdp in (1, 2, 3, 5, 8)),
            *(MeshShape(pp=pp, hdp=hdp) for pp, hdp in ((2, 1), (2, 3), (3, 2), (4, 2), (8, 1))),
            *(MeshShape(pp=2, hdp=2, tp=2), MeshShape(pp=1, hdp=2, tp=4)),
        ]
    ),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=10),
    checkpointing=st.sampled_from(["none", "full", "attention"]),
    tied=st.booleans(),
    ranks_per_node=st.sampled_from([0, 2, 3, 4]),
    seed=st.integers(0, 10**6),
)
def test_a_step_finishes_under_nccls_rules(
    planner: str,
    mesh: MeshShape,
    lengths: list[int],
    checkpointing: str,
    tied: bool,
    ranks_per_node: int,
    seed: int,
) -> None:
    plan = plan_of(planner, lengths, mesh, seed=seed)
    options = {"checkpointing": checkpointing, "tied": tied and (mesh.pp == 1 or mesh.tp > 1)}
    assert_finishes(recorded(plan, mesh, ranks_per_node=ranks_per_node, **options))


PIPELINE = MeshShape(pp=2, hdp=2)


def pipeline_step() -> list[list[Event]]:
    return recorded(uneven([3, 5], [9, 4, 7]), PIPELINE)


def test_a_receive_posted_one_action_ahead_is_caught() -> None:
    """What this project did once: right under gloo, a hang as soon as a launch waits for the whole device."""
    exchange = StageLinks.exchange

    def ahead(self: StageLinks, place: int, made: Tensor | None = None) -> None:
        self._due[place] = self._due.pop(place, []) + self._due.pop(place + 1, [])
        exchange(self, place, made)

    assert_finishes(pipeline_step())
    with patch.object(StageLinks, "exchange", ahead):
        programs = pipeline_step()
    assert not Replay(programs, STREAMS_ONLY).run()
    stuck = Replay(programs, Rules(device_waits=True)).run()
    assert any("everything that its device has been given" in words for words in stuck)
    assert any("has not started its side of it, of the" in words for words in stuck)


def test_a_buffer_allocated_after_a_send_is_posted_is_caught() -> None:
    """The allocation may wait for the send, and the peer may be in the same place."""

    def unguarded(self: StageLinks, place: int, made: Tensor | None = None) -> None:
        due = self._due.pop(place, [])
        exchange(self, place, made)
        self._due[place] = due
        exchange(self, place)

    exchange = StageLinks.exchange
    with patch.object(StageLinks, "exchange", unguarded):
        programs = pipeline_step()
    assert not Replay(programs, STREAMS_ONLY).run()
    assert Replay(programs, Rules(device_waits=True)).run()


def test_one_group_for_both_directions_is_caught() -> None:
    """Its operations run one by one, so that a receive that waits holds up the send that its peer needs."""
    of = Mesh.of

    def one_group(*arguments: object, **options: object) -> Mesh:
        mesh = of(*arguments, **options)  # type: ignore[arg-type]
        object.__setattr__(mesh, "backward", mesh.forward)
        return mesh

    with patch.object(Mesh, "of", staticmethod(one_group)):
        programs = recorded(uneven([4, 4], [9, 4, 7]), MeshShape(pp=4, hdp=2))
    assert Replay(programs, STREAMS_ONLY).run()


def lone_messages(order: list[str]) -> Callable:
    """An ``Exchange._post`` that posts each direction as an operation of its own, in ``order``."""

    def post(self: Exchange, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> list:
        works = []
        for kind in order:
            for tensor, peer in receives if kind == "receive" else sends:
                move = self.group.recv if kind == "receive" else self.group.send  # type: ignore[union-attr]
                works.append(move([tensor], peer, tag))
        return works

    return post


@pytest.mark.parametrize("order", [["receive", "send"], ["send", "receive"]])
def test_lone_messages_around_a_ring_are_caught(order: list[str]) -> None:
    """Everybody's receive waits for a send that stands behind a receive, or the other way round."""
    with patch.object(Exchange, "_post", lone_messages(order)):
        programs = recorded(uneven([2, 2, 2], [9]), MeshShape(hdp=3))
    assert Replay(programs, STREAMS_ONLY).run()


def test_swapped_ring_messages_are_caught() -> None:
    """A member that posts a step's gradients where its neighbours post the next keys."""
    programs = recorded(uneven([2, 2, 2], [13]), MeshShape(hdp=3))
    places = [n for n, event in enumerate(programs[1]) if isinstance(event, Post) and event.ends]
    swapped = 0
    for first, second in pairwise(places):
        one, other = programs[1][first], programs[1][second]
        assert isinstance(one, Post)
        assert isinstance(other, Post)
        if one.ends != other.ends:
            mutated = list(programs[1])
            mutated[first], mutated[second] = replace(one, ends=other.ends), replace(other, ends=one.ends)
            with pytest.raises((Mismatch, AssertionError), match="bytes"):
                assert_finishes([programs[0], mutated, programs[2]])
            swapped += 1
    assert swapped > 2


def test_a_collective_that_one_rank_leaves_out_is_caught() -> None:
    programs = recorded(uneven([2, 2], [9]), MeshShape(hdp=2))
    last = max(n for n, event in enumerate(programs[1]) if getattr(event, "collective", ""))
    programs[1] = programs[1][:last]
    with pytest.raises(Mismatch, match="different numbers of collectives"):
        Replay(programs, STREAMS_ONLY)


@pytest.mark.exhaustive
@examples(3, 24, phases=NO_SHRINKING)
@given(
    planner=st.sampled_from(["naive", "adaptive", "random"]),
    mesh=st.sampled_from(
        [
            *(MeshShape(hdp=2), MeshShape(hdp=3), MeshShape(hdp=5), MeshShape(hdp=2, tp=2), MeshShape(hdp=2, tp=4)),
            *(MeshShape(pp=2, hdp=2), MeshShape(pp=3, hdp=2), MeshShape(pp=2, hdp=2, tp=2)),
        ]
    ),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=10),
    tied=st.booleans(),
    experts=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_reductions_during_backward_finish_under_nccls_rules(
    planner: str, mesh: MeshShape, lengths: list[int], tied: bool, experts: bool, seed: int
) -> None:
    """Two steps: gradients in buckets on a communicator of their own, parameters gathered during forwards."""
    plan = plan_of(planner, lengths, mesh, seed=seed)
    family = "mixtral" if experts else ""
    assert_finishes(recorded(plan, mesh, bucket_bytes=1, tied=tied and (mesh.pp == 1 or mesh.tp > 1), family=family))


def test_a_reduction_before_the_last_message_is_caught() -> None:
    """Rank 0 would reduce amid a ring; rank 1 comes to its reductions only behind the ring."""
    programs = {}
    for silent in (last_backward_is_silent, lambda rank_plan, stage: rank_plan.rank == 0):
        with patch("bytescale.runtime.optimizer.buckets.last_backward_is_silent", silent):
            programs[silent] = recorded(uneven([1, 1], [9]), MeshShape(hdp=2), bucket_bytes=1)
    right, wrong = programs.values()
    assert_finishes(right)
    assert not Replay(wrong, STREAMS_ONLY).run()
    assert Replay(wrong, Rules(device_waits=True)).run()


def test_first_uses_that_wait_in_a_circle_are_caught() -> None:
    """Rank 0 connects to 1, 1 to 2 and 2 to 0, each blocked until its peer's host comes: nobody's does."""

    with patch.object(Exchange, "_post", lone_messages(["send", "receive"])):
        programs = recorded(uneven([1, 1, 1], [9]), MeshShape(hdp=3))
    stuck = Replay(programs, Rules(first_use=True)).run()
    assert any("connected to for the first time" in words for words in stuck)


def test_what_a_host_waits_for_is_worse_than_streams_alone() -> None:
    """More waiting never lets more programs finish."""
    for seed in range(4):
        plan = plan_of("random", [9, 5, 17, 3], MeshShape(hdp=3), seed=seed)
        programs = recorded(plan, MeshShape(hdp=3))
        finished = [not Replay(programs, rules).run() for rules in (STREAMS_ONLY, EVERYTHING)]
        assert finished[0] >= finished[1]
        assert np.all(finished)


def nested_groups(*orders: list[int]) -> Plan:
    """Four groups over four ranks: two inside nodes of two, one across, one of all; ``orders``: of the first ranks."""
    members = [[0, 1], [2, 3], [1, 2], [0, 1, 2, 3]]
    groups = [GroupSpec(sequences=[n], ranks=ranks) for n, ranks in enumerate(members)]
    own = [[n for n, ranks in enumerate(members) if rank in ranks] for rank in range(4)]
    schedule = [[[n] for n in (orders[rank] if rank < len(orders) else own[rank])] for rank in range(4)]
    return Plan.build(lengths=[12] * 4, capacity_tokens=[12] * 4, groups=groups, schedule=schedule)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_rings_of_a_rank_in_two_communicators_finish(checkpointing: str) -> None:
    """A rank's rings inside its node and across nodes alternate; each goes where all its members look for it."""
    plan = nested_groups()
    verify(plan)
    programs = recorded(plan, MeshShape(hdp=4), ranks_per_node=2, checkpointing=checkpointing)
    assert_finishes(programs)
    assert not Replay(programs, EVERYTHING).run()
    for rank, events in enumerate(programs):
        rings = [event.communicator for event in events if isinstance(event, Post) and event.ends]
        assert {communicator.ranks for communicator in rings} == {(0, 1, 2, 3), ((0, 1), (2, 3))[rank // 2]}


def test_one_order_of_groups_is_needed_with_two_communicators_as_well() -> None:
    """Rank 1 takes the group of all before the one inside its node: the other three wait for ever."""
    programs = recorded(nested_groups([0, 3], [2, 3, 0]), MeshShape(hdp=4), ranks_per_node=2)
    assert Replay(programs, STREAMS_ONLY).run()


def test_a_member_that_takes_another_communicator_is_caught() -> None:
    choose = Mesh.ring_exchange

    def astray(self: Mesh, shared: SharedGroup | None) -> Exchange:
        return self.hdp.exchange if self.hdp.rank == 1 else choose(self, shared)

    with patch.object(Mesh, "ring_exchange", astray):
        programs = recorded(nested_groups(), MeshShape(hdp=4), ranks_per_node=2)
    with pytest.raises(Mismatch):
        Replay(programs, STREAMS_ONLY)
