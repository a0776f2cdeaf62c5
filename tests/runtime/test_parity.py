"""The one promise: whatever the plan and the number of ranks, loss and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from bytescale.plan.verify import verify
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import greedy_plan, naive_plan, paper_plan, static_plan
from tests.helpers.decoder import Sizes
from tests.helpers.effort import examples, pairs
from tests.helpers.plans import random_plan
from tests.helpers.steps import (
    make_model,
    planned_step,
    random_batch,
    reference_step,
    worst_relative_error,
)

# fp64 differs only in the order of sums; fp32 keeps 24 bits and sums some hundred terms.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def assert_parity(
    plan: Plan,
    lengths: list[int],
    dtype: torch.dtype,
    *,
    seed: int = 0,
    nodes: Sequence[int] | None = None,
    **changes: Any,
) -> None:
    sizes = Sizes(**changes)
    batch = random_batch(lengths, sizes.vocab_size, seed, real_weights=seed % 2 == 1)
    if batch.num_targets == 0:
        batch.labels[0][0] = 1
    reference = reference_step(make_model(sizes, dtype), batch)
    ours = planned_step(lambda: make_model(sizes, dtype), batch, plan, nodes=nodes)
    assert ours.loss == pytest.approx(reference.loss, rel=TOLERANCE[dtype], abs=TOLERANCE[dtype])
    assert worst_relative_error(ours.gradients, reference.gradients) <= TOLERANCE[dtype]


@examples(5, 60)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    num_ranks=st.integers(1, 8),
    seed=st.integers(0, 10_000),
    heads=st.sampled_from([(6, 2), (4, 4), (4, 1)]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    weighted=st.booleans(),
)
@example(lengths=[1], num_ranks=8, seed=0, heads=(6, 2), dtype=torch.float64, weighted=False)
@example(lengths=[1, 1, 1], num_ranks=3, seed=1, heads=(6, 2), dtype=torch.float64, weighted=False)
@example(lengths=[59, 2, 31], num_ranks=7, seed=2, heads=(4, 1), dtype=torch.float32, weighted=True)
def test_any_plan_gives_the_loss_and_gradients_of_one_process(
    lengths: list[int],
    num_ranks: int,
    seed: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    weighted: bool,
) -> None:
    plan = random_plan(lengths, num_ranks, seed, weighted=weighted)
    num_heads, num_kv_heads = heads
    assert_parity(plan, lengths, dtype, seed=seed, num_heads=num_heads, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize(
    ("nodes", "dtype"), pairs([[0, 0, 1, 1, 1, 2], [0, 1, 0, 1, 0, 1]], [torch.float64, torch.float32])
)
def test_rings_inside_nodes_give_the_loss_and_gradients_of_one_process(nodes: list[int], dtype: torch.dtype) -> None:
    """They have a communicator of their own; a rank takes part in rings inside its node and across nodes by turns."""
    members = [[0, 1], [2, 4], [0, 1, 2], [2, 3, 4], [0, 2], [5, 0], [0, 1, 2, 3, 4, 5]]
    lengths = [31, 17, 40, 23, 9, 5, 61]
    schedule = [[[n] for n, ranks in enumerate(members) if rank in ranks] for rank in range(6)]
    groups = [GroupSpec(sequences=[n], ranks=ranks) for n, ranks in enumerate(members)]
    plan = Plan.build(lengths=lengths, capacity_tokens=[64] * 6, groups=groups, schedule=schedule)
    verify(plan)
    assert_parity(plan, lengths, dtype, nodes=nodes)


@examples(4, 40)
@given(
    planner=st.sampled_from([static_plan, naive_plan, paper_plan, greedy_plan, adaptive_plan]),
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=12),
    num_ranks=st.integers(1, 8),
    slack=st.integers(0, 8),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_every_planner_gives_the_loss_and_gradients_of_one_process(
    planner: Callable[..., Plan], lengths: list[int], num_ranks: int, slack: int, dtype: torch.dtype
) -> None:
    """Capacities so small that the longest sequence needs most of the ranks."""
    capacity = -(-max(lengths) // num_ranks) + slack
    cluster = Cluster.uniform(num_ranks, capacity)
    plan = planner(np.array(lengths), cluster=cluster, cost=CostModel.from_work(linear_per_square=40))
    verify(plan)
    assert_parity(plan, lengths, dtype, seed=slack)


def one_group_plan(lengths: list[int], num_ranks: int) -> Plan:
    """Everything shared by everybody."""
    ranks = list(range(num_ranks))
    return Plan.build(
        lengths=lengths,
        capacity_tokens=[sum(lengths)] * num_ranks,
        groups=[GroupSpec(sequences=list(range(len(lengths))), ranks=ranks)],
        schedule=[[[0]] for _ in ranks],
    )


@pytest.mark.parametrize(("num_ranks", "tied"), pairs([1, 2, 3, 5, 8], [True, False]))
def test_one_group_of_every_size(num_ranks: int, tied: bool) -> None:
    lengths = [37, 1, 8, 3]
    assert_parity(one_group_plan(lengths, num_ranks), lengths, torch.float64, tie_embeddings=tied)


def test_ranks_without_work_take_part_in_the_reduction() -> None:
    plan = Plan.build(
        lengths=[5],
        capacity_tokens=[8, 8, 8],
        groups=[GroupSpec(sequences=[0], ranks=[1])],
        schedule=[[], [[0]], []],
    )
    assert_parity(plan, [5], torch.float64)


def test_a_slice_without_any_valid_target() -> None:
    """Only the first token has a target: every other member's slice has none, as in long prompts with masks."""
    lengths = [40]
    sizes = Sizes()
    batch = random_batch(lengths, sizes.vocab_size, seed=0)
    batch.labels[0][1:] = -100
    batch.labels[0][0] = 7
    plan = one_group_plan(lengths, 4)
    reference = reference_step(make_model(sizes, torch.float64), batch)
    ours = planned_step(lambda: make_model(sizes, torch.float64), batch, plan)
    assert ours.loss == pytest.approx(reference.loss, rel=1e-12)
    # Gradients of later keys are exact zeros in the reference, hence the absolute comparison.
    for name, gradient in reference.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-10, atol=1e-14)


def test_the_slow_kernel_agrees_with_the_fast_one() -> None:
    lengths = [29, 4, 17]
    sizes = Sizes()
    batch = random_batch(lengths, sizes.vocab_size, seed=3)
    plan = one_group_plan(lengths, 3)
    fast = planned_step(lambda: make_model(sizes, torch.float64), batch, plan)
    slow = planned_step(lambda: make_model(sizes, torch.float64), batch, plan, kernel="math")
    assert worst_relative_error(fast.gradients, slow.gradients) <= 1e-12


def test_bf16_stays_close_to_fp32() -> None:
    """bf16 keeps 8 bits: gradients of a two-layer model agree with fp32's to a few per cent, whatever the plan."""
    lengths = [50, 20, 9]
    sizes = Sizes(head_dim=8, hidden_size=48)
    batch = random_batch(lengths, sizes.vocab_size, seed=5)
    reference = reference_step(make_model(sizes, torch.float32), batch)
    ours = planned_step(lambda: make_model(sizes, torch.bfloat16), batch, one_group_plan(lengths, 4))
    assert ours.loss == pytest.approx(reference.loss, rel=1e-2)
    assert worst_relative_error(ours.gradients, reference.gradients) <= 0.05
