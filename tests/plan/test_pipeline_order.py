"""1F1B with shared groups: what hangs is refused with its cycle, what does not hang passes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale.common.errors import PlanError
from bytescale.plan import Plan
from bytescale.plan.pipeline_order import find_cycle
from bytescale.plan.plan import GroupSpec
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


def test_cheap_leaves_the_pipeline_out() -> None:
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


def hangs(plan: Plan, num_stages: int) -> bool:
    """Run 1F1B step by step: does it come to a halt before the end?"""
    queues: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for rank in range(plan.num_ranks):
        micro_batches = list(plan.micro_batches_of(rank))
        for stage in range(num_stages):
            warm = min(num_stages - 1 - stage, len(micro_batches))
            forwards = [("F", m) for m in micro_batches]
            backwards = [("B", m) for m in micro_batches]
            steady = [a for pair in zip(forwards[warm:], backwards, strict=False) for a in pair]
            queues[rank, stage] = forwards[:warm] + steady + backwards[len(micro_batches) - warm :]
    done: set[tuple[str, int, int]] = set()

    def at_head(rank: int, stage: int, direction: str, group: int) -> int | None:
        queue = queues[rank, stage]
        if not queue or queue[0][0] != direction or plan.groups_of(queue[0][1])[0] != group:
            return None
        micro_batch = queue[0][1]
        needs = stage - 1 if direction == "F" else stage + 1
        if 0 <= needs < num_stages and (direction, micro_batch, needs) not in done:
            return None
        return micro_batch

    moved = True
    while moved:
        moved = False
        for (_rank, stage), queue in queues.items():
            if not queue:
                continue
            direction, micro_batch = queue[0]
            group = int(plan.groups_of(micro_batch)[0])
            members = plan.ranks_of(group).tolist()
            heads = [at_head(member, stage, direction, group) for member in members]
            if all(head is not None for head in heads):
                for member, head in zip(members, heads, strict=True):
                    queues[member, stage].pop(0)
                    done.add((direction, head, stage))  # type: ignore[arg-type]
                moved = True
    return any(queues.values())


@settings(max_examples=150, deadline=None)
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
