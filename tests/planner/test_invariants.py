"""Properties that hold for every planner and every batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.errors import ConfigError, PlanError
from bytescale.config.schema import PlannerConfig, PlannerName
from bytescale.cost.cluster import Cluster
from bytescale.plan import Plan
from bytescale.plan.verify import verify
from bytescale.planner.evaluate import evaluate
from bytescale.planner.make import make_planner
from tests.helpers.effort import examples, one_in
from tests.helpers.plans import random_plan
from tests.planner.helpers import COSTS, GRIDS, LINKS, PLANNERS, cases, heavy_tailed
from tests.planner.slow_evaluate import evaluate_slowly

EVERY_PLANNER = pytest.mark.parametrize("name", list(PLANNERS))


@EVERY_PLANNER
@examples(20, 60)
@given(case=cases(), cost=st.sampled_from(sorted(COSTS)))
def test_every_plan_passes_verify(name: str, case: tuple[list[int], Cluster], cost: str) -> None:
    lengths, cluster = case
    plan = PLANNERS[name](lengths, cluster=cluster, cost=COSTS[cost])
    verify(plan)
    assert plan.num_ranks == cluster.num_ranks
    assert plan.lengths.tolist() == lengths
    outcome = evaluate(plan, cluster=cluster, cost=COSTS[cost])
    assert np.isfinite(outcome.micro_batch_end_seconds).all()
    assert outcome.end_seconds >= outcome.ideal_seconds * (1 - 1e-12)


@pytest.mark.parametrize("name", [name for name in PLANNERS if name != "naive"])
@examples(10, 30)
@given(case=cases(), seed=st.integers(0, 1000))
def test_the_order_of_the_input_changes_only_names(name: str, case: tuple[list[int], Cluster], seed: int) -> None:
    lengths, cluster = case
    shuffled = np.random.default_rng(seed).permutation(lengths)
    one = PLANNERS[name](lengths, cluster=cluster, cost=LINKS)
    other = PLANNERS[name](shuffled, cluster=cluster, cost=LINKS)
    assert one.lengths[one.group_sequences].tolist() == other.lengths[other.group_sequences].tolist()
    for part in ("group_sequence_offsets", "group_ranks", "group_weights", "micro_batch_groups"):
        assert getattr(one, part).tolist() == getattr(other, part).tolist()


@EVERY_PLANNER
def test_planning_twice_gives_the_same_plan(name: str) -> None:
    lengths, cluster = heavy_tailed(2000, 96 * 64, 3), Cluster.uniform(96, 64)
    digests = {PLANNERS[name](lengths, cluster=cluster, cost=LINKS).digest() for _ in range(2)}
    assert len(digests) == 1


@EVERY_PLANNER
@pytest.mark.parametrize("num_ranks", one_in(3, [1, 320, 3, 1000, 96]))
def test_any_number_of_ranks(name: str, num_ranks: int) -> None:
    cluster = Cluster.uniform(num_ranks, 64)
    lengths = heavy_tailed(3000, num_ranks * 64, num_ranks)
    verify(PLANNERS[name](lengths, cluster=cluster, cost=LINKS))


@EVERY_PLANNER
def test_more_ranks_than_tokens(name: str) -> None:
    plan = PLANNERS[name]([1, 1, 2], cluster=Cluster.uniform(1000, 1), cost=LINKS)
    verify(plan)


@EVERY_PLANNER
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "no sequences"),
        ([5, 0], "equence 1 has 0 tokens"),
        ([5, -3], "equence 1 has -3 tokens"),
        ([1.5], "float64"),
        ([[1, 2]], "shape"),
        ([5, 41], "equence 1 has 41 tokens, but 4 ranks hold 40"),
    ],
)
def test_bad_batches_are_refused(name: str, lengths: list[int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PLANNERS[name](lengths, cluster=Cluster.uniform(4, 10), cost=LINKS)


def test_a_too_long_sequence_says_what_would_hold_it() -> None:
    with pytest.raises(PlanError, match="use 5 ranks, a capacity of 11 tokens"):
        PLANNERS["adaptive"]([41], cluster=Cluster.uniform(4, 10), cost=LINKS)


def test_make_planner_follows_the_config() -> None:
    cluster = Cluster.uniform(8, 64)
    lengths = heavy_tailed(50, 256, 0)
    names = {
        "static": "static/cp4",
        "naive": "naive",
        "paper": "paper",
        "greedy": "greedy",
        "adaptive": "adaptive",
    }
    assert set(names) == set(get_args(PlannerName))
    for name, planner in names.items():
        config = PlannerConfig(name=name)  # type: ignore[arg-type]
        plan = make_planner(config, cluster, LINKS, context_length=256)(lengths)
        assert plan.planner == planner
    with pytest.raises(ConfigError, match=r"no planner 'best'.*adaptive, paper"):
        make_planner(PlannerConfig(name="best"), cluster, LINKS)  # type: ignore[arg-type]


def test_static_refuses_a_mesh_with_holes() -> None:
    with pytest.raises(PlanError, match="= 3 does not divide the 8 ranks"):
        PLANNERS["static"]([5], cluster=Cluster.uniform(8, 10), cost=LINKS, cp=3)
    with pytest.raises(PlanError, match="raise cp to at least 3"):
        PLANNERS["static"]([25], cluster=Cluster.uniform(8, 10), cost=LINKS, cp=2)


@examples(20, 60)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=14),
    num_ranks=st.integers(1, 7),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_both_evaluators_agree(lengths: list[int], num_ranks: int, seed: int, data: st.DataObject) -> None:
    """To 1e-9 relative: sums are taken in another order."""
    plan: Plan = random_plan(lengths, num_ranks, seed, weighted=True)
    speeds = np.array(data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=num_ranks, max_size=num_ranks)))
    cluster = Cluster(capacity_tokens=plan.capacity_tokens, speeds=speeds)
    cost = replace(GRIDS, attention_block_seconds=1e-4)
    fast = evaluate(plan, cluster=cluster, cost=cost)
    assert fast.end_seconds == pytest.approx(evaluate_slowly(plan, cluster=cluster, cost=cost), rel=1e-9)
    starts, ends = fast.micro_batch_start_seconds, fast.micro_batch_end_seconds
    for rank in range(num_ranks):
        mine = plan.micro_batches_of(rank)
        for before, after in pairwise(mine):
            assert starts[after] >= ends[before] - 1e-9
