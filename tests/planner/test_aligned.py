"""Aligned plans have the same groups and no cycle for any number of stages. Some published plans do hang."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.cost.cluster import Cluster
from bytescale.plan.pipeline_order import find_cycle
from bytescale.plan.verify import verify
from bytescale.planner.adaptive.aligned import align, aligned, is_aligned
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import greedy_plan, naive_plan, paper_plan
from tests.helpers.effort import examples
from tests.helpers.plans import random_plan
from tests.planner.helpers import COSTS, IDEAL, cases, heavy_tailed

ALIGNED = {
    "pp-balance": aligned(partial(paper_plan, pipeline=True)),
    "dp-balance": aligned(paper_plan),
    "greedy": aligned(greedy_plan),
    "adaptive": partial(adaptive_plan, num_stages=4),
}


@pytest.mark.parametrize("name", list(ALIGNED))
@examples(8, 60)
@given(case=cases(), cost=st.sampled_from(sorted(COSTS)))
def test_aligned_planners_cannot_hang(name: str, case: tuple[list[int], Cluster], cost: str) -> None:
    lengths, cluster = case
    plan = ALIGNED[name](lengths, cluster=cluster, cost=COSTS[cost])
    verify(plan)
    assert is_aligned(plan)
    for num_stages in (2, 4, 8):
        assert find_cycle(plan, num_stages) == []


@examples(12, 100)
@given(count=st.integers(1, 12), num_ranks=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_aligning_keeps_the_groups_of_any_plan(count: int, num_ranks: int, seed: int) -> None:
    plan = random_plan([7] * count, num_ranks, seed)
    cluster = Cluster.uniform(num_ranks, int(plan.capacity_tokens[0]))
    aligned = align(plan, cluster=cluster, cost=IDEAL)
    verify(aligned, num_stages=4)
    assert is_aligned(aligned)
    groups = [
        sorted((some.sequences_of(group).tolist(), int(some.group_sizes[group])) for group in range(some.num_groups))
        for some in (plan, aligned)
    ]
    assert groups[0] == groups[1]


def test_the_published_rules_can_hang_and_aligning_helps() -> None:
    cluster = Cluster.uniform(32, 64)
    batches = [heavy_tailed(60, 2048, seed, exponent=0.7) for seed in range(12)]
    planners = (partial(paper_plan, pipeline=True), naive_plan)
    for planner in planners:
        plans = [planner(lengths, cluster=cluster, cost=IDEAL) for lengths in batches]
        hanging = [plan for plan in plans if find_cycle(plan, 4)]
        assert hanging
        for plan in hanging:
            assert not is_aligned(plan)
            verify(align(plan, cluster=cluster, cost=IDEAL), num_stages=4)


def test_mixed_ranks_in_a_pipeline() -> None:
    speeds = np.where(np.arange(12) < 5, 2.0, 1.0)
    cluster = Cluster(capacity_tokens=np.full(12, 64), speeds=speeds)
    for seed in range(10):
        plan = adaptive_plan(heavy_tailed(60, 512, seed), cluster=cluster, cost=IDEAL, num_stages=4)
        verify(plan, num_stages=4)
