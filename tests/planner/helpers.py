"""Planners under test, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st

from bytescale.common.arrays import IntArray
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan import Plan
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import greedy_plan, naive_plan, paper_plan, static_plan
from bytescale.planner.rounds.planner import rounds_plan

Planner = Callable[..., Plan]

PLANNERS: dict[str, Planner] = {
    "static": static_plan,
    "naive": naive_plan,
    "paper": paper_plan,
    "paper-pp": partial(paper_plan, pipeline=True),
    "paper-delta-0": partial(paper_plan, pipeline=True, delta_seconds=0.0),
    "greedy": greedy_plan,
    "adaptive": adaptive_plan,
    "rounds": rounds_plan,
}

IDEAL = CostModel.from_work()

# About a 7B model: 8K tokens take 1.3 s, of which attention 0.3 s; a ring step of 8K tokens 54 ms inside a node, 430 ms
# across nodes (more than the attention that could hide it).
LINKS = CostModel(
    attention_seconds_per_pair=4.5e-9,
    token_seconds=1.2e-4,
    micro_batch_seconds=0.02,
    ring_bytes_per_token=262144.0 * 5,
    ring_step_seconds=2e-3,
    intra_node_bytes_per_second=200e9,
    inter_node_bytes_per_second=25e9,
    ranks_per_node=8,
)

# With 32 query heads over 8 key heads: the queries of a token are four times its keys.
GRIDS = replace(LINKS, row_bytes_per_token=32 * 4096 * 12.0)

COSTS = {"ideal": IDEAL, "links": LINKS, "grids": GRIDS, "blocks": replace(LINKS, attention_block_seconds=1e-4)}


def heavy_tailed(num_sequences: int, longest: int, seed: int, *, exponent: float = 1.2) -> IntArray:
    """``[num_sequences]`` Pareto lengths up to ``longest``."""
    random = np.random.default_rng(seed)
    lengths = 8 * (1 + random.pareto(exponent, num_sequences))
    return np.minimum(lengths, longest).astype(np.int64)


@st.composite
def cases(draw: Any, *, max_ranks: int = 40, max_sequences: int = 60) -> tuple[list[int], Cluster]:
    """A batch that a uniform cluster can hold."""
    num_ranks = draw(st.integers(1, max_ranks))
    capacity = draw(st.sampled_from([1, 2, 7, 16, 100]))
    room = num_ranks * capacity
    length = st.one_of(st.integers(1, min(room, 3 * capacity)), st.integers(1, room), st.just(room), st.just(1))
    lengths = draw(st.lists(length, min_size=1, max_size=max_sequences))
    return lengths, Cluster.uniform(num_ranks, capacity)
