"""The shapes of shared groups: what they cost, and which ones the adaptive planner takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.errors import ConfigError
from bytescale.config.schema import PlannerConfig
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel, Pass
from bytescale.cost.profile import Profile
from bytescale.cost.profile_file import load_profile
from bytescale.cost.stage import stage_times
from bytescale.data.length_distributions import sample_lengths
from bytescale.plan import RankPlan, SharedGroup
from bytescale.plan.limits import MemoryLimits, Phase
from bytescale.plan.nodes import alignment, crossings
from bytescale.plan.tiles import shares_of
from bytescale.plan.verify import verify
from bytescale.planner.adaptive.degrees import DegreeGrid
from bytescale.planner.adaptive.effort import MANY
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.adaptive.unequal import last_end, shares, unequal_blocks
from bytescale.planner.baselines import static_plan
from bytescale.planner.evaluate import evaluate
from bytescale.planner.verified import VerifiedPlanner, narrowed
from bytescale.simulator import ClusterConfig, simulate
from bytescale.simulator.events import events_of
from tests.attention.test_grid import grid_plan
from tests.helpers.effort import examples
from tests.helpers.llama import spec_of_llama
from tests.planner.helpers import GRIDS, IDEAL, LINKS, heavy_tailed
from tests.planner.slow_evaluate import evaluate_slowly

CASE_STUDY = load_profile("case-study")
COSTS = {
    "sums": GRIDS,
    "passes": CASE_STUDY.cost_model(ranks_per_node=8),
    "slow": replace(
        CASE_STUDY.cost_model(ranks_per_node=8), inter_node_bytes_per_second=1e9, ring_message_seconds=1e-3
    ),
}


@examples(40, 300)
@given(
    tokens=st.integers(1000, 4_000_000),
    degree=st.integers(2, 2000),
    inter_node=st.booleans(),
    name=st.sampled_from(sorted(COSTS)),
)
def test_the_best_shape_is_never_slower_than_the_ring(tokens: int, degree: int, inter_node: bool, name: str) -> None:
    cost = COSTS[name]
    ring = cost.exposed_seconds(tokens, tokens**2, degree, inter_node)
    best, columns, down = cost.best_shape(tokens, tokens**2, degree, inter_node)
    assert degree % int(columns) == 0
    assert best <= ring
    rows_far = inter_node and (bool(down) or cost.ranks_per_node % int(columns) != 0)
    again = cost.exposed_seconds(tokens, tokens**2, degree, inter_node and not down, columns, rows_far)
    assert best == pytest.approx(again, rel=1e-12)
    assert (columns == 1) == (best == ring)


def test_exposed_time_by_hand() -> None:
    """12 ranks in 3 columns: queries and results of 2 columns beside a block each, keys of 3 rows, the first beside one
    block and the others beside 3.
    """
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
    keys, row = 10 * 120 / 12 + 0.5, 15 * 120 / 12 + 0.5
    expected = (keys - block) + 2 * (keys - 3 * block) + 2 * 2 * (row - block) + (3 + 4) * 0.25
    assert cost.exposed_seconds(tokens, tokens**2, 12, True, 3, True) == pytest.approx(expected)
    # Two columns lie in a node of four.
    row = 15 * 120 / 12 / 2 + 0.5
    expected = (keys - block) + 4 * (keys - 2 * block) + 2 * (row - block) + (5 + 2) * 0.25
    assert cost.exposed_seconds(tokens, tokens**2, 12, True, 2) == pytest.approx(expected)


def test_which_runs_of_members_lie_in_a_node() -> None:
    """Of 8 ranks: from a node's begin, from its middle, from an odd rank, and scattered."""
    groups = [range(8, 24), range(4, 20), range(3, 9), [0, 1, 2, 4]]
    ranks, sizes = np.concatenate([list(group) for group in groups]), np.array([len(group) for group in groups])
    assert alignment(ranks, sizes, ranks_per_node=8).tolist() == [8, 4, 1, 1]
    # Rows of 8 leave a node from rank 4 on, and rows of 4 do not.
    cost = replace(GRIDS, attention_seconds_per_pair=1e-12)
    assert cost.shape_seconds(1e5, 1e10, 16, 8, True, 4).seconds > cost.shape_seconds(1e5, 1e10, 16, 8, True, 8).seconds
    assert (
        cost.shape_seconds(1e5, 1e10, 16, 4, True, 4).seconds == cost.shape_seconds(1e5, 1e10, 16, 4, True, 8).seconds
    )


def test_forward_does_not_hide_the_messages_of_backward() -> None:
    """Forward computes for 6 s beside messages of 2 s, backward for 12 s beside messages of 14 s."""
    whole = CostModel(
        attention_seconds_per_pair=18.0 * 4,
        token_seconds=0.0,
        ring_bytes_per_token=16.0,
        inter_node_bytes_per_second=1.0,
    )
    passes = (
        Pass(attention=1 / 3, keys=1 / 8, queries=0.0, results=0.0, steps=0.5),
        Pass(attention=2 / 3, keys=7 / 8, queries=0.5, results=0.5, steps=0.5),
    )
    assert whole.exposed_seconds(2.0, 1.0, 2, True) == 0
    assert replace(whole, passes=passes).exposed_seconds(2.0, 1.0, 2, True) == pytest.approx(2)


@examples(40, 300)
@given(
    length=st.integers(1000, 4_000_000),
    rows=st.integers(1, 64),
    columns=st.sampled_from([1, 2, 3, 8, 32]),
    name=st.sampled_from(sorted(COSTS)),
)
def test_one_group_in_plain_floats_takes_as_long(length: int, rows: int, columns: int, name: str) -> None:
    cost, degree = COSTS[name], rows * columns
    node = cost.ranks_per_node
    slow = cost.shape_seconds(length, length**2, degree, columns, degree > node, node).seconds
    assert cost.exposed_of_one(length, degree, columns) == pytest.approx(float(slow), rel=1e-9)


@examples(20, 150)
@given(
    lengths=st.lists(st.integers(100, 400_000), min_size=1, max_size=3),
    shape=st.sampled_from([(rows, columns) for rows in (1, 2, 3, 8, 9) for columns in (1, 2, 4, 6, 8)]),
    seed=st.integers(0, 100),
    rate=st.sampled_from([1e8, 1e9, 1e11]),
)
def test_planner_and_simulator_agree_on_every_shape(
    lengths: list[int], shape: tuple[int, int], seed: int, rate: float
) -> None:
    """Members in any order on nodes of four, forward and backward of a whole step without its gradients."""
    rows, columns = shape
    links = replace(CASE_STUDY.links, inter_node_bytes_per_second=rate, message_seconds=1e-4)
    profile = replace(CASE_STUDY, links=links)
    plan = grid_plan(lengths, rows * columns, columns)
    ranks = np.arange(rows * columns) if seed % 2 else np.random.default_rng(seed).permutation(rows * columns)
    plan = replace(plan, group_ranks=ranks)
    cost = profile.cost_model(ranks_per_node=4)
    ours = evaluate(plan, cluster=Cluster.uniform(rows * columns, sum(lengths)), cost=cost).end_seconds
    times = stage_times(profile, events_of(plan, ranks_per_node=4).loads, has_head=True)
    assert ours == pytest.approx(times.total.sum(axis=0).max(), rel=1e-9)


@pytest.mark.parametrize(("heavy", "down"), [("keys", True), ("queries", False)])
def test_the_heavier_direction_stays_inside_the_node(heavy: str, down: bool) -> None:
    """64 ranks on nodes of 8 as 8 x 8: either rows or columns lie in a node."""
    bytes_per_token = {"ring_bytes_per_token": 1e6, "row_bytes_per_token": 1e6}
    bytes_per_token["ring_bytes_per_token" if heavy == "keys" else "row_bytes_per_token"] *= 3
    cost = replace(
        GRIDS, attention_seconds_per_pair=1e-12, intra_node_bytes_per_second=1e11, inter_node_bytes_per_second=1e9
    )
    cost = replace(cost, **bytes_per_token)
    cluster = Cluster.uniform(64, 4096)
    plan = adaptive_plan([64 * 4096], cluster=cluster, cost=cost)
    verify(plan)
    far = crossings(plan.group_ranks, plan.group_sizes, plan.group_columns, ranks_per_node=8)
    assert plan.group_columns.tolist() == [8]
    assert (far.columns[0], far.rows[0]) == ((False, True) if down else (True, False))
    end = evaluate(plan, cluster=cluster, cost=cost).end_seconds
    other = replace(plan, group_ranks=plan.group_ranks.reshape(8, 8).T.ravel())
    assert end < evaluate(other, cluster=cluster, cost=cost).end_seconds


def test_a_cost_model_without_rows_refuses_grids_by_name() -> None:
    assert LINKS.best_shape(1e6, 1e12, 64, True).columns == 1
    with pytest.raises(ConfigError, match=r"bytes that a grid's rows exchange.*use a profile"):
        LINKS.exposed_seconds(1e6, 1e12, 64, True, 4, True)


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
    assert ends[0] <= ends[1] * (1 + 1e-9)


def test_a_plan_that_reaches_its_target_is_compared_with_a_mesh() -> None:
    """The sequences of a mesh's pack hide each other's messages, so the mesh ends before the target of grids."""
    links = replace(
        CASE_STUDY.links,
        intra_node_bytes_per_second=1.4e10,
        inter_node_bytes_per_second=7.5e10,
        latency_seconds=1.2e-3,
    )
    heads = spec_of_llama("7b", **CASE_STUDY.model.config, num_key_value_heads=32)
    cost = replace(CASE_STUDY.scaled_to(heads, tensor_parallel=1), links=links).cost_model(ranks_per_node=4)
    cluster = Cluster.uniform(5, 8192)
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(16), np.log(5 * 8192), 400)).astype(np.int64)
    end = evaluate(adaptive_plan(lengths, cluster=cluster, cost=cost), cluster=cluster, cost=cost).end_seconds
    mesh = evaluate(static_plan(lengths, cluster=cluster), cluster=cluster, cost=cost).end_seconds
    rings = adaptive_plan(lengths, cluster=cluster, cost=replace(cost, row_bytes_per_token=None))
    assert end <= mesh * (1 + 1e-9)
    assert end <= evaluate(rings, cluster=cluster, cost=cost).end_seconds * (1 + 1e-9)


UNEQUAL = Cluster(capacity_tokens=np.full(24, 8192), speeds=np.where(np.arange(24) % 8 < 4, 1.0, 0.5))


@pytest.mark.parametrize(
    ("cluster", "seed", "longest", "count"), [(Cluster.uniform(8, 8192), 4, 6700, 24), (UNEQUAL, 16, 60_000, 12)]
)
def test_no_pipeline_ends_later_than_with_rings(cluster: Cluster, seed: int, longest: int, count: int) -> None:
    """On slow links, where narrower groups in grids promised a shorter longest block, and ended 2 % and 9 % later."""
    heads = spec_of_llama("7b", **CASE_STUDY.model.config, num_key_value_heads=32)
    links = replace(
        CASE_STUDY.links,
        intra_node_bytes_per_second=1e11,
        inter_node_bytes_per_second=3.5e9,
        latency_seconds=2e-3,
    )
    profile = replace(CASE_STUDY.scaled_to(heads, tensor_parallel=1), links=links)
    cost = profile.cost_model(ranks_per_node=4, pipeline_parallel=2)
    lengths = np.random.default_rng(seed).integers(100, longest, count)
    ends = []
    for known in (cost, replace(cost, row_bytes_per_token=None)):
        plan = adaptive_plan(lengths, cluster=cluster, cost=known, num_stages=2)
        ends.append(evaluate(plan, cluster=cluster, cost=cost, num_stages=2).end_seconds)
    assert ends[0] <= ends[1] * (1 + 1e-9)


@examples(20, 200)
@given(
    length=st.integers(1, 200_000),
    first=st.integers(0, 40),
    most=st.integers(1, 24),
    capacity=st.sampled_from([1000, 8192]),
)
def test_a_group_of_unequal_ranks_takes_as_long_as_its_last_member(
    length: int, first: int, most: int, capacity: int
) -> None:
    speeds = np.where(np.arange(64) % 8 < 4, 1.0, 0.4)
    cluster = Cluster(capacity_tokens=np.where(speeds < 1, capacity, 8192), speeds=speeds)
    lengths = np.array([length])
    degree, seconds = unequal_blocks(
        DegreeGrid(IDEAL, cluster.num_ranks), lengths, np.ones(1, np.int64), 1e30, cluster
    ).grow(0, first, most, None)
    if degree == 0:
        assert cluster.capacity_tokens[first : first + most].sum() < length
        return
    members = slice(first, first + degree)
    parts = shares(length, speeds[members], cluster.capacity_tokens[members])
    slowest = float(IDEAL.work_seconds(length)) * float((parts / speeds[members]).max()) / length
    assert seconds == pytest.approx(slowest, rel=1 / MANY)


@examples(20, 200)
@given(data=st.data(), count=st.integers(1, 12))
def test_the_last_member_ends_as_with_shares_that_are_rounded(data: st.DataObject, count: int) -> None:
    capacity = np.array(data.draw(st.lists(st.integers(1000, 8192), min_size=count, max_size=count)))
    speeds = np.array(data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.2]), min_size=count, max_size=count)))
    length = data.draw(st.integers(count, int(capacity.sum())))
    rounded = shares(length, speeds, capacity) / speeds
    exact = last_end(length, list(zip(capacity.tolist(), speeds.tolist(), strict=True)))
    assert rounded.max() - 2.0 <= exact <= rounded.max() + 1e-6


def test_unequal_ranks_have_grids_whose_rows_are_alike() -> None:
    """Half of the ranks have half the speed: rows hold members of one speed, and all members end together."""
    cost = replace(CASE_STUDY.cost_model(ranks_per_node=4), inter_node_bytes_per_second=1e9)
    speeds = np.where(np.arange(64) < 32, 1.0, 0.5)
    mixed = Cluster(capacity_tokens=np.full(64, 8192), speeds=speeds)
    ends = {}
    for name, known in (("grids", cost), ("rings", replace(cost, row_bytes_per_token=None))):
        plan = adaptive_plan([300_000], cluster=mixed, cost=known)
        verify(plan)
        ends[name] = evaluate(plan, cluster=mixed, cost=cost).end_seconds
        if name == "grids":
            (columns,) = plan.group_columns.tolist()
            assert columns > 1
            rows = speeds[plan.group_ranks].reshape(-1, columns)
            assert (rows == rows[:, :1]).all()
            assert evaluate_slowly(plan, cluster=mixed, cost=cost) == pytest.approx(ends["grids"], rel=1e-9)
    assert ends["grids"] < 0.9 * ends["rings"]


@examples(20, 150)
@given(
    shape=st.sampled_from([(2, 1), (1, 2), (3, 1), (1, 4), (2, 2), (2, 3), (3, 2), (4, 3), (3, 4), (4, 4)]),
    seed=st.integers(0, 1000),
)
def test_a_members_tile_is_what_its_blocks_compute(shape: tuple[int, int], seed: int) -> None:
    """Pairs of query and key, counted block by block, against the product of the row's and the column's shares."""
    columns, size = shape[1], shape[0] * shape[1]
    weights = np.random.default_rng(seed).integers(1, 5, size)
    plan = grid_plan([2 * 60 * int(weights.sum())], size, columns, tuple(weights.tolist()))
    shares = shares_of(plan.group_weights, plan.group_sizes, plan.group_columns)
    for rank in range(size):
        (micro_batch,) = RankPlan.of(plan, rank).micro_batches
        shared = micro_batch.shared
        assert shared is not None
        tokens = shared.tokens_per_member.astype(float)
        row, column = tokens[list(shared.row)].sum(), tokens[list(shared.column)].sum()
        assert row * column / tokens.sum() ** 2 == pytest.approx(shares.tile[rank], rel=1e-2)
        pairs = 0
        for query in shared.row:
            for key in shared.column:
                pairs += 2 * visible_pairs(shared, query, key)
        assert pairs / tokens.sum() ** 2 == pytest.approx(shares.tile[rank], rel=2e-2)


def visible_pairs(shared: SharedGroup, query: int, key: int) -> float:
    """Pairs that one member's queries of the only sequence see of another's keys; half of a triangle's square."""
    front, back = np.diff(shared.bounds[:, 0], axis=-1)[..., 0].astype(float).T
    if query == key:
        return (front[query] ** 2 + back[query] ** 2) / 2 + front[query] * back[query]
    same_side = front[query] * front[key] if query > key else back[query] * back[key]
    return float(same_side + back[query] * front[key])


@pytest.mark.parametrize(("row_bytes", "grids_are_left"), [(1.0, True), (1000.0, False)])
def test_a_grid_without_memory_gets_fewer_columns(row_bytes: float, grids_are_left: bool) -> None:
    """On the same ranks, and where no grid fits there, a plan made for rings is better."""
    lengths = sample_lengths("github", 4 << 20, 0, 1 << 20)
    cost, cluster = load_profile("case-study").cost_model(ranks_per_node=4), Cluster.uniform(2048, 8192)
    phase = Phase(name="ring", bytes_per_token=1.0, bytes_per_row_token=row_bytes)
    limits = MemoryLimits(
        states_bytes=0.0, saved_bytes_per_token=0.0, movable_bytes_per_token=0.0, phases=(phase,), device_bytes=1e9
    )
    plan = VerifiedPlanner(PlannerConfig(), cluster, cost, limits)(lengths)
    assert narrowed(plan, limits) is plan
    small = replace(limits, device_bytes=8192.0)
    narrow = narrowed(plan, small)
    assert (plan.group_columns % narrow.group_columns == 0).all()
    assert (narrow.group_columns < plan.group_columns).any()
    assert (narrow.group_columns > 1).any() == grids_are_left
    assert np.array_equal(narrow.group_ranks, plan.group_ranks)

    rings = VerifiedPlanner(PlannerConfig(), cluster, replace(cost, row_bytes_per_token=None), small)(lengths)
    best = VerifiedPlanner(PlannerConfig(), cluster, cost, small)(lengths)
    ends = [evaluate(plan, cluster=cluster, cost=cost).end_seconds for plan in (narrow, rings, best)]
    assert ends[2] == min(ends)
    assert (ends[0] < ends[1]) == grids_are_left


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
    """Queries beside a block, as are the first keys; other keys beside Q blocks; results beside a block."""
    links = replace(load_profile("case-study").links, message_seconds=0.125)
    one_layer = spec_of_llama("tiny", num_hidden_layers=1)
    profile: Profile = Profile.from_flops(one_layer, flops_per_second=1e9, links=links)
    plan = grid_plan([96_000], 12, 3)
    events = events_of(plan, ranks_per_node=4)
    times = stage_times(profile, events.loads, has_head=False)
    tokens = 8000
    for direction, attention in enumerate((profile.attention_forward, profile.attention_backward)):
        block = attention.quadratic * 96_000**2 / 144
        per_token = (profile.ring_forward_bytes_per_token, profile.ring_backward_bytes_per_token)[direction]
        keys = per_token * tokens / links.inter_node_bytes_per_second + links.latency_seconds
        # Rows of three ranks do not lie in nodes of four.
        there, home = (
            size * tokens / links.inter_node_bytes_per_second + links.latency_seconds
            for size in profile.row_bytes_per_token[direction]
        )
        expected = 2 * max(0.0, there - block) + 2 * max(0.0, home - block)
        expected += max(0.0, keys - block) + 2 * max(0.0, keys - 3 * block)
        assert times.exposed_ring[direction].max() == pytest.approx(expected + (3 + 4) * 0.125)
