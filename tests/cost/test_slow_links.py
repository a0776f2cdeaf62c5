"""Links that the first cost model takes for ten times too fast or too slow are found from when passes end."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale.common.arrays import IntArray
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.cost.slow_links import after_step, most_probable, with_slow_links
from bytescale.plan import Plan
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.evaluate import evaluate

RANKS = Cluster.uniform(4, 2048)
TRUE = CostModel(
    attention_seconds_per_pair=8e-8,
    token_seconds=1e-4,
    ring_bytes_per_token=3072,
    ring_step_seconds=1e-3,
    intra_node_bytes_per_second=2.5e6,
    inter_node_bytes_per_second=2.5e6,
    ranks_per_node=1,
)


def batch(random: np.random.Generator, longest: int) -> IntArray:
    short = random.integers(64, 1500, size=20)
    return np.append(short, random.integers(longest // 2, longest, size=1) if longest else [])  # type: ignore[no-any-return]


def seconds_of(plan: Plan, cost: CostModel) -> float:
    return evaluate(plan, cluster=RANKS, cost=cost).end_seconds


def learned(first: CostModel, *, steps: int, longest: int = 8192, noise: float = 0.05, odd: int = -1) -> list[float]:
    """The factor after each step. The last ranks of step ``odd`` end three times as late."""
    random = np.random.default_rng(0)
    weights: tuple[float, ...] = ()
    found = []
    for step in range(steps):
        believed = with_slow_links(first, most_probable(weights))
        plan = adaptive_plan(batch(random, longest).astype(np.int64), cluster=RANKS, cost=believed)
        seconds = seconds_of(plan, TRUE) * random.normal(1, noise) * (3 if step == odd else 1)
        weights = after_step(weights, lambda factor, of=plan: seconds_of(of, with_slow_links(first, factor)), seconds)
        found.append(most_probable(weights))
    return found


@pytest.mark.parametrize("wrong", [0.1, 1.0, 10.0])
def test_wrong_links_are_found_within_two_steps(wrong: float) -> None:
    factors = learned(with_slow_links(TRUE, 1 / wrong), steps=8)
    assert np.abs(np.log(np.array(factors[1:]) / wrong)).max() < 0.25
    plan = adaptive_plan([8192, *[512] * 16], cluster=RANKS, cost=TRUE)
    predicted = seconds_of(plan, with_slow_links(TRUE, factors[-1] / wrong))
    assert predicted == pytest.approx(seconds_of(plan, TRUE), rel=0.1)


def test_one_disturbed_step_changes_little() -> None:
    factors = learned(TRUE, steps=8, odd=6)
    assert max(factors[6:]) < 1.25


def test_steps_whose_messages_nobody_waits_for_say_nothing() -> None:
    assert set(learned(TRUE, steps=3, longest=0)) == {1.0}
    hidden = with_slow_links(TRUE, 1e-4)
    plan = adaptive_plan([8192, *[512] * 16], cluster=RANKS, cost=hidden)
    weights = after_step((), lambda factor: seconds_of(plan, with_slow_links(hidden, factor)), seconds_of(plan, hidden))
    assert most_probable(weights) == pytest.approx(1.0)
