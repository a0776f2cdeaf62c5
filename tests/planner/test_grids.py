"""The shapes of shared groups: what they cost, and which ones the adaptive planner takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.errors import ConfigError
from bytescale.config import PRESETS, PlannerConfig
from bytescale.cost import Cluster, CostModel, Profile, load_profile
from bytescale.cost.stage import stage_times
from bytescale.data.length_distributions import sample_lengths
from bytescale.plan.limits import MemoryLimits, Phase
from bytescale.plan.verify import verify
from bytescale.planner import adaptive_plan, evaluate
from bytescale.planner.adaptive.degrees import block_seconds, timer
from bytescale.planner.verified import VerifiedPlanner
from bytescale.simulator import ClusterConfig, simulate
from bytescale.simulator.events import events_of
from tests.attention.test_grid import grid_plan
from tests.helpers.effort import examples
from tests.planner.helpers import GRIDS, LINKS, heavy_tailed


@examples(40, 300)
@given(
    tokens=st.integers(1000, 4_000_000),
    degree=st.integers(2, 2000),
    inter_node=st.booleans(),
    message=st.sampled_from([0.0, 1e-3]),
)
def test_the_best_shape_is_never_slower_than_the_ring(
    tokens: int, degree: int, inter_node: bool, message: float
) -> None:
    cost = replace(GRIDS, ring_message_seconds=message)
    ring = cost.exposed_seconds(tokens, tokens**2, degree, inter_node)
    best, columns = cost.best_shape(tokens, tokens**2, degree, inter_node)
    assert degree % int(columns) == 0
    assert best <= ring
    assert best == pytest.approx(cost.exposed_seconds(tokens, tokens**2, degree, inter_node, columns), rel=1e-12)
    assert (columns == 1) == (best == ring)


def test_exposed_time_by_hand() -> None:
    """12 ranks in 3 columns: 3 transfers of keys beside 3 blocks each, 2 of queries and results beside 2 blocks."""
    cost = CostModel(
        attention_seconds_per_pair=1e-3,
        token_seconds=0.0,
        ring_bytes_per_token=10.0,
        row_bytes_per_token=30.0,
        ring_step_seconds=0.5,
        ring_message_seconds=0.25,
        intra_node_bytes_per_second=2.0,
        inter_node_bytes_per_second=1.0,
        ranks_per_node=4,
    )
    tokens, block = 120.0, 1e-3 * 120**2 / 144
    keys, row = 10 * 120 / 12 + 0.5, 30 * 120 / 12 + 2 * 0.5
    expected = 3 * (keys - 3 * block + 0.25) + 2 * (row - 2 * block + 0.5)
    assert cost.exposed_seconds(tokens, tokens**2, 12, True, 3) == pytest.approx(expected)
    # Two columns lie in a node of four.
    row = 30 * 120 / 12 / 2 + 2 * 0.5
    expected = 5 * (keys - 2 * block + 0.25) + 1 * (row - 2 * block + 0.5)
    assert cost.exposed_seconds(tokens, tokens**2, 12, True, 2) == pytest.approx(expected)


@examples(40, 300)
@given(length=st.integers(1000, 4_000_000), degree=st.integers(1, 2000))
def test_the_fast_timer_tells_the_same(length: int, degree: int) -> None:
    for cost in (GRIDS, LINKS, replace(GRIDS, ring_message_seconds=1e-3, inter_node_ring_step_seconds=5e-3)):
        slow = block_seconds(cost, np.array([length]), np.array([degree]))[0]
        fast = timer(cost)(float(cost.work_seconds([length])[0]), length, degree)
        assert fast == pytest.approx(slow, rel=1e-9)


def test_a_cost_model_without_rows_refuses_grids_by_name() -> None:
    assert LINKS.best_shape(1e6, 1e12, 64, True)[1] == 1
    with pytest.raises(ConfigError, match=r"bytes that a grid's rows exchange.*planner.grids = false"):
        LINKS.exposed_seconds(1e6, 1e12, 64, True, 4)


@pytest.mark.parametrize("seed", [0, 1])
def test_grids_break_the_wall_of_the_longest_ring(seed: int) -> None:
    """7B, github, 2M, 2048 ranks: a ring of the longest document is as slow as on 1024."""
    profile = load_profile("case-study")
    cost = profile.cost_model(ranks_per_node=4)
    lengths = sample_lengths("github", 32 << 20, seed, 2 << 20)
    cluster = Cluster.uniform(2048, 8192)
    grids = adaptive_plan(lengths, cluster=cluster, cost=cost)
    rings = adaptive_plan(lengths, cluster=cluster, cost=replace(cost, row_bytes_per_token=None))
    verify(grids)
    assert (grids.group_columns > 1).any()
    assert (rings.group_columns == 1).all()
    grid, ring = (evaluate(plan, cluster=cluster, cost=cost) for plan in (grids, rings))
    assert ring.end_seconds > 2.2 * grid.end_seconds
    assert grid.end_seconds < 1.05 * grid.ideal_seconds
    devices = ClusterConfig(num_gpus=4096, tp=2)
    assert simulate(rings, profile, devices).step_seconds > 2.2 * simulate(grids, profile, devices).step_seconds


@examples(10, 60)
@given(seed=st.integers(0, 10**6), num_ranks=st.sampled_from([4, 16, 40, 96]))
def test_no_batch_ends_later_than_with_rings(seed: int, num_ranks: int) -> None:
    lengths = heavy_tailed(60, 40_000 * num_ranks, seed, exponent=0.6) * 100
    cluster = Cluster.uniform(num_ranks, int(-(-int(lengths.max()) // num_ranks)) + 8192)
    lengths = np.minimum(lengths, num_ranks * int(cluster.capacity_tokens[0]))
    slow = replace(GRIDS, inter_node_bytes_per_second=2e9, intra_node_bytes_per_second=2e10)
    grids = adaptive_plan(lengths, cluster=cluster, cost=slow)
    rings = adaptive_plan(lengths, cluster=cluster, cost=replace(slow, row_bytes_per_token=None))
    ends = [evaluate(plan, cluster=cluster, cost=slow).end_seconds for plan in (grids, rings)]
    assert ends[0] <= ends[1] * 1.01


def test_unequal_ranks_and_the_setting_keep_rings() -> None:
    lengths = sample_lengths("github", 4 << 20, 0, 1 << 20)
    cost = load_profile("case-study").cost_model(ranks_per_node=4)
    speeds = np.where(np.arange(512) < 256, 1.0, 0.5)
    mixed = Cluster(capacity_tokens=np.full(512, 8192), speeds=speeds)
    assert (adaptive_plan(lengths, cluster=mixed, cost=cost).group_columns == 1).all()
    equal = Cluster.uniform(2048, 8192)
    for grids in (True, False):
        planned = VerifiedPlanner(PlannerConfig(grids=grids), equal, cost)(lengths)
        assert (planned.group_columns > 1).any() == grids


def test_a_grid_without_memory_becomes_a_ring() -> None:
    lengths = sample_lengths("github", 4 << 20, 0, 1 << 20)
    cost, cluster = load_profile("case-study").cost_model(ranks_per_node=4), Cluster.uniform(2048, 8192)
    phase = Phase(name="ring", bytes_per_token=1.0, bytes_per_row_token=1.0)
    limits = MemoryLimits(
        states_bytes=0.0, saved_bytes_per_token=0.0, movable_bytes_per_token=0.0, phases=(phase,), device_bytes=1e9
    )
    plan = VerifiedPlanner(PlannerConfig(), cluster, cost, limits)(lengths)
    assert (plan.group_columns > 1).any()
    narrow = VerifiedPlanner(PlannerConfig(), cluster, cost, replace(limits, device_bytes=8192.0))(lengths)
    assert (narrow.group_columns <= plan.group_columns).all()
    assert (narrow.group_columns < plan.group_columns).any()
    assert np.array_equal(narrow.group_ranks, plan.group_ranks)


@pytest.mark.parametrize(("size", "columns"), [(6, 1), (6, 2), (6, 3), (8, 4), (8, 8)])
@pytest.mark.parametrize("weighted", [False, True])
def test_simulated_traffic_is_the_attentions_formula(size: int, columns: int, weighted: bool) -> None:
    """What all ranks send, in tokens of keys, queries and results (tests/attention/test_grid.py counts real bytes)."""
    weights = tuple(range(1, size + 1)) if weighted else ()
    plan = grid_plan([4800], size, columns, weights)
    events = events_of(plan, ranks_per_node=size)
    assert events.ring_tokens.sum() == pytest.approx(4800 * (size // columns - 1))
    assert events.row_tokens.sum(axis=0) == pytest.approx([4800 * (columns - 1)] * 2)
    assert events.ring_is_near.all()


def test_a_stage_of_a_grid_by_hand() -> None:
    """Queries beside a block (the first beside local attention too), keys beside Q blocks, results beside a block."""
    profile: Profile = Profile.from_flops(
        PRESETS["tiny"], flops_per_second=1e9, links=replace(load_profile("case-study").links, message_seconds=0.125)
    )
    plan = grid_plan([96_000], 12, 3)
    events = events_of(plan, ranks_per_node=4)
    times = stage_times(profile, events.loads, num_layers=1, has_head=False)
    links, tokens = profile.links, 8000
    for direction, attention in enumerate((profile.attention_forward, profile.attention_backward)):
        block = attention.quadratic * 96_000**2 / 144
        per_token = (profile.ring_forward_bytes_per_token, profile.ring_backward_bytes_per_token)[direction]
        keys = per_token * tokens / links.inter_node_bytes_per_second + links.latency_seconds
        # Rows of three ranks do not lie in nodes of four.
        there, home = (
            size * tokens / links.inter_node_bytes_per_second + links.latency_seconds
            for size in profile.row_bytes_per_token[direction]
        )
        expected = 2 * max(0.0, there - block) + 3 * max(0.0, keys - 3 * block) + 2 * max(0.0, home - block)
        assert times.exposed_ring[direction].max() == pytest.approx(expected + (3 + 4) * 0.125)
