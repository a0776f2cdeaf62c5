"""1F1B with shared groups: a plan that hangs is refused with its cycle, and other plans pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.errors import PlanError
from bytescale.plan import Plan
from bytescale.plan.pipeline_order import find_cycle
from bytescale.plan.plan import GroupSpec
from bytescale.plan.schedule import action_times, messages, stage_actions
from bytescale.plan.verify import verify
from tests.helpers.effort import examples
from tests.helpers.plans import random_plan


def architecture_example() -> Plan:
    """docs/architecture.md: rank A runs [g1, g2], rank B runs [g1, y, y', g2]. Groups 0, 1 = g1, g2; 2, 3 = y, y'."""
    return Plan.build(
        lengths=[20, 20, 5, 5],
        capacity_tokens=[20, 20],
        groups=[
            GroupSpec(sequences=[0], ranks=[0, 1]),
            GroupSpec(sequences=[1], ranks=[0, 1]),
            GroupSpec(sequences=[2], ranks=[1]),
            GroupSpec(sequences=[3], ranks=[1]),
        ],
        schedule=[[[0], [1]], [[0], [2], [3], [1]]],
    )


def test_the_deadlock_of_the_architecture_page_is_refused_with_its_cycle() -> None:
    verify(architecture_example())
    with pytest.raises(PlanError, match="pipeline") as error:
        verify(architecture_example(), num_stages=2)
    assert "backward of group 0" in str(error.value)
    assert "forward of group 1" in str(error.value)
    assert "ranks 0, 1" in str(error.value)
    cycle = find_cycle(architecture_example(), 2)
    assert cycle[0] == cycle[-1]
    assert len(set(cycle)) == len(cycle) - 1


def test_cheap_looks_at_the_pipeline_too() -> None:
    with pytest.raises(PlanError, match="pipeline"):
        verify(architecture_example(), num_stages=2)


def test_the_same_groups_at_equal_places_do_not_hang() -> None:
    plan = architecture_example()
    aligned = Plan.build(
        lengths=plan.lengths,
        capacity_tokens=plan.capacity_tokens,
        groups=[
            GroupSpec(sequences=[0], ranks=[0, 1]),
            GroupSpec(sequences=[1], ranks=[0, 1]),
            GroupSpec(sequences=[2], ranks=[1]),
            GroupSpec(sequences=[3], ranks=[1]),
        ],
        schedule=[[[0], [1]], [[0], [1], [2], [3]]],
    )
    for num_stages in range(1, 6):
        verify(aligned, num_stages=num_stages)


def hangs(plan: Plan, num_stages: int) -> bool:
    """Does it come to a halt before the end, where every rank waits for each thing that it posts, one by one?

    Every (rank, stage) has a list of things to do: an action, which all members of its group do together, or the
    messages between two actions, which are posted at once. A message is done when both ends are posted.
    """
    queues = {
        (rank, stage): _to_do(plan, rank, stage, num_stages)
        for rank in range(plan.num_ranks)
        for stage in range(num_stages)
    }

    def posted() -> set[tuple]:
        """The ends of messages that have been posted: all those before the head of a queue, and at it."""
        at_heads = ((rank, stage, queue[0]) for (rank, stage), queue in queues.items() if queue)
        return passed | {(rank, m, stage) for rank, stage, (kind, ms) in at_heads if kind == "messages" for m in ms}

    passed: set[tuple] = set()

    def finished(rank: int, stage: int) -> bool:
        """Can the head of this queue be done now?"""
        kind, items = queues[rank, stage][0]
        if kind == "messages":
            ends = posted()
            return all((rank, item, end) in ends for item in items for end in (item.maker, item.taker))
        backward, micro_batch = items
        members = plan.ranks_of(int(plan.groups_of(micro_batch)[0])).tolist()
        group = int(plan.groups_of(micro_batch)[0])
        for member in members:
            queue = queues[member, stage]
            if not queue or queue[0][0] != "action":
                return False
            its_backward, its_micro_batch = queue[0][1]
            if its_backward != backward or plan.groups_of(its_micro_batch)[0] != group:
                return False
        return True

    moved = True
    while moved:
        moved = False
        for (rank, stage), queue in queues.items():
            if not queue or not finished(rank, stage):
                continue
            kind, items = queue[0]
            together = [rank] if kind == "messages" else plan.ranks_of(int(plan.groups_of(items[1])[0])).tolist()
            if kind == "messages":
                passed.update((rank, item, stage) for item in items)
            for member in together:
                queues[member, stage].pop(0)
            moved = True
    return any(queues.values())


def _to_do(plan: Plan, rank: int, stage: int, num_stages: int) -> list:
    numbers = plan.micro_batches_of(rank)
    actions = stage_actions(len(numbers), num_stages, stage).tolist()
    everywhere = [m for taker in range(num_stages) for m in messages(len(numbers), num_stages, taker)]
    result: list = []
    for place in range(len(actions) + 1):
        between = [m for m in everywhere if m.maker == stage and m.made_at == place - 1]
        between += [m for m in everywhere if m.taker == stage and m.posted_before == place]
        if between:
            result.append(("messages", between))
        if place < len(actions):
            backward, index = actions[place]
            result.append(("action", (backward, int(numbers[index]))))
    return result


@examples(20, 60)
@given(
    num_sequences=st.integers(1, 10),
    num_ranks=st.integers(1, 4),
    num_stages=st.integers(2, 4),
    seed=st.integers(0, 10**6),
)
def test_a_cycle_is_found_exactly_when_running_would_hang(
    num_sequences: int, num_ranks: int, num_stages: int, seed: int
) -> None:
    plan = random_plan([7] * num_sequences, num_ranks, seed)
    assert bool(find_cycle(plan, num_stages)) == hangs(plan, num_stages)


@given(count=st.integers(1, 25), num_stages=st.integers(2, 8))
def test_the_clock_grows_along_everything_that_is_waited_for(count: int, num_stages: int) -> None:
    """On every stage from action to action, and across every message; no receive is an action ahead."""
    orders = [stage_actions(count, num_stages, stage) for stage in range(num_stages)]
    times = [action_times(order, num_stages, stage) for stage, order in enumerate(orders)]
    assert all((np.diff(own) > 0).all() for own in times)
    for stage in range(num_stages):
        found = messages(count, num_stages, stage)
        assert len(found) == count * ((stage > 0) + (stage < num_stages - 1))
        for message in found:
            made, place = times[message.maker][message.made_at], message.posted_before
            assert made < times[stage][place] <= times[stage][message.taken_at]
            assert place == 0 or times[stage][place - 1] <= made
            assert message.taken_at == place


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
def test_a_pipeline_alone_never_hangs(num_stages: int) -> None:
    """Whatever its number of micro-batches, multiples of the stages or not."""
    for count in range(1, 3 * num_stages):
        plan = Plan.build(
            lengths=[5] * count,
            capacity_tokens=[5],
            groups=[GroupSpec(sequences=[n], ranks=[0]) for n in range(count)],
            schedule=[[[n] for n in range(count)]],
        )
        assert find_cycle(plan, num_stages) == []


@given(count=st.integers(0, 12), num_stages=st.integers(1, 5), stage=st.integers(0, 4))
def test_every_action_stands_in_the_schedule_once(count: int, num_stages: int, stage: int) -> None:
    actions = stage_actions(count, num_stages, min(stage, num_stages - 1))
    assert len(actions) == 2 * count
    places = {tuple(action): place for place, action in enumerate(actions.tolist())}
    for index in range(count):
        assert places[0, index] < places[1, index]
