"""1F1B with shared groups: what hangs is refused with its cycle, what does not hang passes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale.common.errors import PlanError
from bytescale.plan import Plan
from bytescale.plan.pipeline_order import find_cycle
from bytescale.plan.plan import GroupSpec
from bytescale.plan.schedule import stage_actions
from bytescale.plan.verify import verify
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
        verify(architecture_example(), num_stages=2, level="cheap")


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


def hangs(plan: Plan, num_stages: int, num_chunks: int = 1) -> bool:
    """Run the schedule action by action, members of a group together: does it come to a halt before the end?"""
    queues = {
        (rank, stage): [
            (bool(backward), int(chunk) * num_stages + stage, int(plan.micro_batches_of(rank)[index]))
            for backward, chunk, index in stage_actions(len(plan.micro_batches_of(rank)), num_stages, stage, num_chunks)
        ]
        for rank in range(plan.num_ranks)
        for stage in range(num_stages)
    }
    last = num_stages * num_chunks - 1
    done: set[tuple[bool, int, int]] = set()

    def ready(rank: int, stage: int, backward: bool, part: int, group: int) -> int | None:
        """The micro-batch at the head of a queue, if it is this group's, and its input has come."""
        queue = queues[rank, stage]
        if not queue or queue[0][:2] != (backward, part) or plan.groups_of(queue[0][2])[0] != group:
            return None
        micro_batch = queue[0][2]
        if backward:
            needs = (True, part + 1, micro_batch) if part < last else (False, part, micro_batch)
        else:
            needs = (False, part - 1, micro_batch) if part else None
        return micro_batch if needs is None or needs in done else None

    moved = True
    while moved:
        moved = False
        for (_rank, stage), queue in queues.items():
            if not queue:
                continue
            backward, part, micro_batch = queue[0]
            group = int(plan.groups_of(micro_batch)[0])
            members = plan.ranks_of(group).tolist()
            heads = [ready(member, stage, backward, part, group) for member in members]
            if all(head is not None for head in heads):
                for member, head in zip(members, heads, strict=True):
                    queues[member, stage].pop(0)
                    done.add((backward, part, head))  # type: ignore[arg-type]
                moved = True
    return any(queues.values())


@settings(max_examples=200, deadline=None)
@given(
    num_sequences=st.integers(1, 10),
    num_ranks=st.integers(1, 4),
    num_stages=st.integers(2, 4),
    num_chunks=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_a_cycle_is_found_exactly_when_running_would_hang(
    num_sequences: int, num_ranks: int, num_stages: int, num_chunks: int, seed: int
) -> None:
    plan = random_plan([7] * num_sequences, num_ranks, seed)
    assert bool(find_cycle(plan, num_stages, num_chunks)) == hangs(plan, num_stages, num_chunks)


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
def test_a_pipeline_alone_never_hangs(num_stages: int, num_chunks: int) -> None:
    """Whatever its number of micro-batches, multiples of the stages or not."""
    for count in range(1, 3 * num_stages):
        plan = Plan.build(
            lengths=[5] * count,
            capacity_tokens=[5],
            groups=[GroupSpec(sequences=[n], ranks=[0]) for n in range(count)],
            schedule=[[[n] for n in range(count)]],
        )
        assert find_cycle(plan, num_stages, num_chunks) == []


@given(count=st.integers(0, 12), num_stages=st.integers(1, 5), stage=st.integers(0, 4), num_chunks=st.integers(1, 3))
def test_every_action_stands_in_the_schedule_once(count: int, num_stages: int, stage: int, num_chunks: int) -> None:
    actions = stage_actions(count, num_stages, min(stage, num_stages - 1), num_chunks)
    assert len(actions) == 2 * count * num_chunks
    places = {tuple(action): place for place, action in enumerate(actions.tolist())}
    for chunk in range(num_chunks):
        for index in range(count):
            assert places[0, chunk, index] < places[1, chunk, index]
