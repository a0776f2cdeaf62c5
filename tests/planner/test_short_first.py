"""Short sequences first: a plan that is run backwards in time ends as early, and packs may be cut for 2 % more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.cost.cluster import Cluster
from bytescale.parity.compare import random_plan
from bytescale.plan.verify import verify
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.evaluate import evaluate
from bytescale.planner.short_first import LEAST_WORK, backwards, cut_packs, short_first
from tests.helpers.effort import examples
from tests.planner.helpers import GRIDS, LINKS, heavy_tailed

FAST = replace(LINKS, micro_batch_seconds=1e-4)


@examples(30, 500)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 2**31))
def test_any_plan(lengths: list[int], num_ranks: int, seed: int) -> None:
    """Rules, makespan and work are kept, whatever the groups and their shapes; twice backwards is the plan itself."""
    plan = random_plan(lengths, num_ranks, seed, weighted=False)
    turned = backwards(plan)
    verify(turned)
    cluster = Cluster.uniform(num_ranks, sum(lengths))
    ends = [evaluate(each, cluster=cluster, cost=GRIDS).end_seconds for each in (plan, turned)]
    assert ends[1] <= ends[0] * (1 + 1e-9)
    assert backwards(turned).digest() == plan.digest()
    cheap = replace(GRIDS, micro_batch_seconds=1e-3)
    cut = cut_packs(turned, cheap)
    verify(cut)
    before, after = (evaluate(each, cluster=cluster, cost=cheap).end_seconds for each in (turned, cut))
    assert after <= before * (1 + 1 / LEAST_WORK)
    assert cut.num_micro_batches >= plan.num_micro_batches


@pytest.mark.parametrize("num_ranks", [7, 64, 256])
def test_short_sequences_come_first(num_ranks: int) -> None:
    lengths = np.concatenate([[2**18], heavy_tailed(800, 8192, 0)])
    cluster = Cluster.uniform(num_ranks, 40960)
    plan = adaptive_plan(lengths, cluster=cluster, cost=FAST)
    turned = short_first(plan, FAST)
    verify(turned)
    ends = []
    for each in (plan, turned):
        outcome = evaluate(each, cluster=cluster, cost=FAST)
        groups = np.zeros(each.num_groups)
        counts = np.diff(each.micro_batch_group_offsets)
        np.maximum.at(groups, each.micro_batch_groups, np.repeat(outcome.micro_batch_end_seconds, counts))
        of_sequences = np.zeros(len(lengths))
        of_sequences[each.group_sequences] = np.repeat(groups, np.diff(each.group_sequence_offsets))
        ends.append(of_sequences)
    assert ends[1].max() <= ends[0].max() * (1 + 1 / LEAST_WORK)
    assert ends[1][1:].mean() < ends[0][1:].mean()


def test_packs_are_cut_where_it_is_cheap() -> None:
    """Three equal sequences: three micro-batches where launches are free, one where they cost as much as the work."""
    lengths = [100, 300, 200]
    cluster = Cluster.uniform(1, 600)
    plan = adaptive_plan(lengths, cluster=cluster, cost=LINKS)
    assert plan.num_micro_batches == 1
    free = cut_packs(plan, replace(LINKS, micro_batch_seconds=0.0))
    assert [plan_lengths.tolist() for plan_lengths in np.split(free.lengths[free.group_sequences], [1, 2])] == [
        [100], [200], [300],
    ]  # fmt: skip
    assert free.num_micro_batches == 3
    assert cut_packs(plan, LINKS).num_micro_batches == 1
