"""Each step of the planners against a slow, obvious twin."""

from __future__ import annotations

import heapq
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.arrays import IntArray
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.planner.adaptive.degrees import DegreeGrid, Rectangles, block_seconds, degrees_within, equal_blocks
from bytescale.planner.adaptive.fill import deal, into_holes
from bytescale.planner.adaptive.free import FreeTime, Placement
from bytescale.planner.adaptive.place import reserve, share_low, stack
from bytescale.planner.adaptive.target import Batch, target_seconds
from bytescale.planner.adaptive.unequal import shares
from bytescale.planner.baselines import greedy_plan, naive_plan, paper_plan
from bytescale.planner.batch import longest_first, rising
from bytescale.planner.packing import best_fit, micro_batches
from tests.helpers.effort import examples
from tests.planner.helpers import GRIDS, IDEAL, LINKS, heavy_tailed

LINEAR = CostModel(attention_seconds_per_pair=0.0, token_seconds=1.0)
"""A token takes a second."""


def test_longest_first_breaks_ties_by_number() -> None:
    assert longest_first(np.array([3, 9, 3, 9, 1])).tolist() == [1, 3, 0, 2, 4]
    assert longest_first(np.array([7])).tolist() == [0]


def test_best_fit_takes_the_fullest_bin_that_holds_the_item() -> None:
    assert best_fit(np.array([6, 5, 4, 3, 2]), 10).tolist() == [0, 1, 0, 1, 1]


@examples(33, 100)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    num_ranks=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
def test_micro_batches_are_best_fit_on_every_rank(sizes: list[int], num_ranks: int, seed: int) -> None:
    """All ranks at once give what one rank after the other does, with capacities that differ."""
    random = np.random.default_rng(seed)
    ranks = np.sort(random.integers(0, num_ranks, len(sizes)))
    capacity = random.integers(20, 50, num_ranks)
    lengths = np.array(sizes)
    index = micro_batches(lengths, ranks, capacity)
    for rank in range(num_ranks):
        mine = ranks == rank
        assert index[mine].tolist() == best_fit(lengths[mine], int(capacity[rank])).tolist()


def members_of(placement: Placement) -> list[np.ndarray]:
    """Ranks of each group."""
    return np.split(placement.ranks, placement.degrees.cumsum()[:-1])


def blocks_of(lengths: np.ndarray, degrees: np.ndarray, cost: CostModel, num_ranks: int) -> Rectangles:
    """Groups of these lengths, each on at least so many ranks, descending."""
    return equal_blocks(DegreeGrid(cost, num_ranks), lengths, degrees, np.inf)


def reserved(
    lengths: np.ndarray, degrees: np.ndarray, cost: CostModel, num_ranks: int, target: float, whole: np.ndarray
) -> Placement:
    blocks = blocks_of(lengths, degrees, cost, num_ranks)
    return reserve(blocks, lengths, num_ranks=num_ranks, target=target, whole_seconds=whole)


def earliest_start(placed: list[tuple[float, float, int]], num_ranks: int, degree: int, seconds: float) -> float:
    """The slow twin of reservations: try every moment at which a group starts or ends, look at every other moment."""
    moments = sorted({0.0, *(start for start, _, _ in placed), *(end for _, end, _ in placed)})

    def busy(moment: float) -> int:
        return sum(width for start, end, width in placed if start <= moment < end)

    def has_room(start: float) -> bool:
        return all(
            busy(moment) + degree <= num_ranks
            for moment in (start, *(moment for moment in moments if start < moment < start + seconds))
        )

    return next(start for start in moments if has_room(start))


@examples(33, 100)
@given(
    items=st.lists(st.tuples(st.integers(2, 20), st.integers(1, 6000)), min_size=1, max_size=40),
    num_ranks=st.integers(2, 30),
)
def test_backfilled_groups_start_at_the_first_moment_with_room(items: list[tuple[int, int]], num_ranks: int) -> None:
    """With all the time that they may need, and on ranks: nobody waits but for a group's first member to be free."""
    degrees = np.sort(np.minimum([degree for degree, _ in items], num_ranks))[::-1].copy()
    lengths = np.array([length for _, length in items])
    seconds = block_seconds(IDEAL, lengths, degrees)
    found = reserved(lengths, degrees, IDEAL, num_ranks, float(seconds.sum()) * 2, np.zeros(0))
    assert np.array_equal(found.degrees, degrees[found.groups])
    ends, replayed = np.zeros(num_ranks), {}
    for item, ranks in zip(found.groups.tolist(), members_of(found), strict=True):
        assert len(set(ranks.tolist())) == degrees[item]
        replayed[item] = start = ends[ranks].max()
        ends[ranks] = start + seconds[item]
    assert sorted(replayed) == list(range(len(lengths)))
    assert np.allclose(ends, found.free_at)
    placed: list[tuple[float, float, int]] = []
    for item, (degree, height) in enumerate(zip(degrees.tolist(), seconds.tolist(), strict=True)):
        start = earliest_start(placed, num_ranks, degree, height)
        assert replayed[item] == pytest.approx(start, abs=1e-6 * seconds.sum())
        placed.append((start, start + height, degree))


def test_backfilling_takes_ranks_that_are_no_neighbours() -> None:
    """The picture in ``free``: of two ranks that c leaves and one that a leaves, d takes all three at once."""
    degrees, seconds = np.array([5, 3, 3, 2, 2]), np.array([12, 8, 6, 7, 4])
    found = reserved(degrees * seconds, degrees, LINEAR, 7, 20.0, np.full(10, 1.0))
    members = dict(zip(found.groups.tolist(), members_of(found), strict=True))
    assert sorted(len(ranks) for ranks in members.values()) == [2, 2, 3, 3, 5]
    assert not set(members[1].tolist()) & set(members[2].tolist())
    assert found.free_at.max() == pytest.approx(20.0)


def test_whole_sequences_fill_holes_before_groups_where_they_would_be_late() -> None:
    """The picture again: a second before d is needed once the whole sequences take 16 s, of 15 behind the groups."""
    degrees, seconds = np.array([5, 3, 3, 2, 2]), np.array([12, 8, 6, 7, 4])
    for count in (15, 16, 17):
        found = reserved(degrees * seconds, degrees, LINEAR, 7, 20.0, np.ones(count))
        inside = found.groups[found.groups >= len(degrees)]
        assert len(inside) == (count == 16)  # of 17, one is late whatever is done: nothing is moved
        if len(inside):
            members = dict(zip(found.groups.tolist(), members_of(found), strict=True))
            (rank,) = members[int(inside[0])].tolist()
            assert rank in members[2]
            assert found.groups.tolist().index(inside[0]) < found.groups.tolist().index(2)
            assert found.free_at.sum() == pytest.approx(7 * 20 - 15)


@given(seconds=st.lists(st.integers(1, 100), max_size=60), holes=st.lists(st.integers(0, 120), min_size=1, max_size=30))
def test_no_hole_is_overfull_and_none_has_room_for_what_is_left(seconds: list[int], holes: list[int]) -> None:
    falling, rooms = np.sort(np.array(seconds, dtype=float))[::-1], np.array(holes, dtype=float)
    taken = into_holes(falling, rooms)
    left = rooms - np.bincount(taken[taken >= 0], weights=falling[taken >= 0], minlength=len(rooms))
    assert (left >= 0).all()
    assert (taken >= 0).all() or falling[taken < 0].min() > left.max()


def test_backfilling_grows_what_is_late_and_no_more() -> None:
    """Three groups of 4 of 10 ranks, 6 s each, and 10 s: two side by side, and the third on 6 ranks for its 4 s."""
    found = reserved(np.full(3, 24), np.full(3, 4), LINEAR, 10, 10.0, np.zeros(0))
    assert found.degrees.tolist() == [4, 4, 6]
    assert found.free_at.max() == pytest.approx(10.0)


@examples(20, 60)
@given(
    items=st.lists(st.tuples(st.integers(2, 20), st.integers(1, 6000)), min_size=1, max_size=60),
    num_ranks=st.integers(2, 45),
    slack=st.sampled_from([1.0, 1.3, 3.0]),
)
def test_backfilled_narrow_groups_stay_inside_nodes(items: list[tuple[int, int]], num_ranks: int, slack: float) -> None:
    """Also where nothing can be in time; and times are what a replay of the groups in order gives."""
    node = LINKS.ranks_per_node
    degrees = np.sort(np.minimum([degree for degree, _ in items], num_ranks))[::-1].copy()
    lengths = np.array([length for _, length in items])
    target = slack * float((block_seconds(LINKS, lengths, degrees) * degrees).sum()) / num_ranks
    found = reserved(lengths, degrees, LINKS, num_ranks, target, np.full(3, 0.01 * target))
    assert sorted(found.groups.tolist()) == list(range(len(lengths)))
    assert (found.degrees >= degrees[found.groups]).all()
    ends = np.zeros(num_ranks)
    for item, ranks in zip(found.groups, members_of(found), strict=True):
        assert (np.diff(ranks) > 0).all()
        if len(ranks) <= node:
            assert ranks[0] // node == ranks[-1] // node
        seconds = float(block_seconds(LINKS, lengths[item : item + 1], np.array([len(ranks)]))[0])
        ends[ranks] = ends[ranks].max() + seconds
    assert np.allclose(ends, found.free_at, rtol=1e-9)


def test_narrow_groups_fill_what_wide_ones_leave_of_nodes() -> None:
    """Nodes of 4: a on five ranks and b on three, then c on all. A group of 4 fits before c, one of 3 does not."""
    degrees, seconds = np.array([8, 5, 5, 4, 3, 2]), np.array([4, 8, 8, 3, 3, 1])
    blocks = blocks_of(degrees * seconds, degrees, LINEAR, 8)._replace(node=4)
    found = reserve(blocks, degrees * seconds, num_ranks=8, target=23.0, whole_seconds=np.zeros(0))
    members = dict(zip(found.groups.tolist(), members_of(found), strict=True))
    assert sorted(members) == list(range(6))
    for group in (3, 4, 5):
        assert members[group][0] // 4 == members[group][-1] // 4
    assert len(members[4]) == 3
    assert found.free_at.max() <= 23.0


@given(
    seconds=st.lists(st.integers(20, 100), min_size=1, max_size=40),
    slots=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 120)), min_size=1, max_size=12),
)
def test_low_gaps_get_a_sequence_each_that_ends_in_time(seconds: list[int], slots: list[tuple[int, int]]) -> None:
    falling, num_ranks = np.sort(np.array(seconds))[::-1].copy(), sum(width for width, _ in slots)
    free = FreeTime(blocks_of(np.zeros(0, int), np.zeros(0, int), LINEAR, num_ranks), num_ranks, 100.0)
    free.gaps = sorted(
        (float(time), sum(width for width, _ in slots[:at]), width, np.inf, 0.0)
        for at, (width, time) in enumerate(slots)
    )
    ends = np.repeat([float(time) for _, time in slots], [width for width, _ in slots])
    share_low(free, falling, falling.astype(float), LINEAR)
    found = free.placement()
    assert len(set(found.groups.tolist())) == len(found.groups)
    for number, ranks in zip(found.groups.tolist(), members_of(found), strict=bool(len(found.groups))):
        assert len(ranks) > 1
        assert len(set(ends[ranks].tolist())) == 1
        assert 0 < 100 - ends[ranks[0]] < 1.5 * falling[-1]
        ends[ranks] += falling[number] / len(ranks)
        assert found.free_at[ranks] == pytest.approx(ends[ranks])
        assert ends[ranks[0]] <= 100 + 1e-6


def test_groups_that_take_next_to_no_time_are_placed() -> None:
    """Shorter than what counts as the same moment: they still take their ranks, one after the other."""
    found = reserved(np.array([10**9, 2, 2]), np.array([4, 2, 2]), LINEAR, 4, 1e12, np.zeros(0))
    assert sorted(found.groups.tolist()) == [0, 1, 2]
    assert found.free_at.max() == pytest.approx(2.5e8)


def test_what_cannot_be_in_time_is_placed_all_the_same() -> None:
    found = reserved(np.array([4000, 4000]), np.array([2, 2]), IDEAL, 2, 1.0, np.zeros(0))
    assert sorted(found.groups.tolist()) == [0, 1]
    assert found.ranks.tolist() == [0, 1, 0, 1]


@given(keys=st.lists(st.integers(0, 2**40), max_size=200))
def test_radix_order_is_a_stable_argsort(keys: list[int]) -> None:
    array = np.array(keys, dtype=np.int64)
    assert rising(array).tolist() == np.argsort(array, kind="stable").tolist()


def longest_processing_time(seconds: np.ndarray, free_at: np.ndarray) -> float:
    """``deal`` one by one."""
    heap = free_at.tolist()
    heapq.heapify(heap)
    for item in seconds.tolist():
        heapq.heappush(heap, heapq.heappop(heap) + item)
    return max(heap)


@examples(33, 100)
@given(count=st.integers(1, 300), num_ranks=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_dealing_in_bulk_is_close_to_dealing_one_by_one(count: int, num_ranks: int, seed: int) -> None:
    """Not later than one by one by more than a fifth of one sequence."""
    random = np.random.default_rng(seed)
    seconds = np.sort(random.pareto(1.5, count) + 0.1)[::-1]
    free_at = random.uniform(0, seconds.sum() / num_ranks, num_ranks)
    ranks, ends = deal(seconds, free_at)
    assert np.allclose(ends, free_at + np.bincount(ranks, weights=seconds, minlength=num_ranks))
    by_one = longest_processing_time(seconds, free_at)
    assert ends.max() <= by_one + 0.2 * seconds[0] + 1e-9


def test_dealing_leaves_out_ranks_that_stick_out() -> None:
    """A thousand ranks a hair below the surface: what they share goes to none that is above it."""
    free_at = np.concatenate((np.full(1000, 10.0 - 1e-6), np.full(5, 11.0)))[::-1]
    ranks, ends = deal(np.full(3, 1.0), free_at.copy())
    assert (free_at[ranks] < 10).all()
    assert len(set(ranks.tolist())) == 3
    assert ends.max() == pytest.approx(11.0)


def test_dealing_follows_speed_and_capacity() -> None:
    ranks, ends = deal(
        np.full(90, 1.0),
        np.zeros(3),
        speeds=np.array([1.0, 2.0, 6.0]),
        lengths=np.full(90, 10),
        capacity=np.array([10, 10, 9]),
    )
    assert np.bincount(ranks, minlength=3).tolist() == [30, 60, 0]
    assert ends.tolist() == [30.0, 30.0, 0.0]


@examples(20, 60)
@given(
    count=st.integers(1, 30),
    num_ranks=st.integers(1, 70),
    whole_slot=st.sampled_from([0.0, 0.3, 0.6]),
    links=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_nobody_waits_inside_blocks(count: int, num_ranks: int, whole_slot: float, links: bool, seed: int) -> None:
    """Replay the blocks: all ranks of each are free at the same moment, and no small group leaves its node."""
    cost = LINKS if links else IDEAL
    random = np.random.default_rng(seed)
    lengths = np.sort(random.integers(1, 5000, count))[::-1].copy()
    degrees = np.sort(random.integers(1, num_ranks + 1, count))[::-1].copy()
    target = float(cost.work_seconds(lengths).sum() / num_ranks * random.uniform(0.5, 2))
    asked = blocks_of(lengths, degrees, cost, num_ranks)
    blocks = stack(asked, num_ranks, target=target, whole_slot=whole_slot).placement()
    free_at = np.zeros(num_ranks)
    assert (blocks.degrees >= degrees[blocks.groups]).all()
    for length, ranks in zip(lengths[blocks.groups], members_of(blocks), strict=True):
        first, degree = int(ranks[0]), len(ranks)
        assert ranks.tolist() == list(range(first, first + degree))
        members = free_at[first : first + degree]
        assert (members == members[0]).all()
        if links and degree <= cost.ranks_per_node:
            assert not cost.leaves_node(first, degree)
        members += float(block_seconds(cost, np.array([length]), np.array([degree]))[0])
    assert np.allclose(free_at, blocks.free_at, rtol=1e-9)


@examples(20, 60)
@given(length=st.integers(1, 2_000_000), num_ranks=st.integers(1, 300), factor=st.floats(0.2, 3.0))
def test_degrees_are_the_fewest_in_time(length: int, num_ranks: int, factor: float) -> None:
    """By trying all of them. Where a ring of as many ranks as compute needs is late, one step of the grid more."""
    fewest = np.array([max(1, num_ranks // 3)])
    every = np.arange(fewest[0], num_ranks + 1)
    taken = block_seconds(LINKS, np.full(len(every), length), every)
    limit = factor * float(taken.max())
    degree, seconds = degrees_within(DegreeGrid(LINKS, num_ranks), np.array([length]), fewest, limit)
    assert seconds[0] == pytest.approx(float(taken[degree[0] - fewest[0]]), rel=1e-12)
    in_time = every[taken <= limit]
    if len(in_time):
        assert seconds[0] <= limit * (1 + 1e-9)
        assert in_time[0] <= degree[0] <= max(in_time[0] + 1, 1.07 * in_time[0])
    else:
        assert seconds[0] <= 1.01 * taken.min()


def test_a_length_is_tried_once_for_all_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of a pipeline's levels, in any order, give the degrees that each gives alone."""
    tried = list[int]()
    once = DegreeGrid._try

    def counted(self: DegreeGrid, lengths: list[int], fewest: IntArray) -> None:
        tried.extend(lengths)
        once(self, lengths, fewest)

    monkeypatch.setattr(DegreeGrid, "_try", counted)
    lengths = np.sort(heavy_tailed(300, 2_000_000, 3, exponent=0.3))[::-1].copy()
    fewest = -(-lengths // 8192)
    limits = [10.0, 0.1, 3.0, 0.5, 10.0, 1.0]
    kept = DegreeGrid(GRIDS, 512)
    together = [degrees_within(kept, lengths, fewest, limit) for limit in limits]
    assert 0 < len(tried) == len(set(tried))
    for limit, found in zip(limits, together, strict=True):
        for one, other in zip(found, degrees_within(DegreeGrid(GRIDS, 512), lengths, fewest, limit), strict=True):
            assert (one == other).all()


def test_the_target_of_free_communication_is_the_mean() -> None:
    lengths = heavy_tailed(500, 4096, 1)[::-1].copy()
    batch = Batch.of(np.sort(lengths)[::-1].copy(), Cluster.uniform(64, 64), IDEAL)
    assert batch.target == pytest.approx(float(IDEAL.work_seconds(lengths).sum()) / 64, rel=1e-12)


def test_the_target_is_never_below_the_longest_on_its_best_degree() -> None:
    target = target_seconds(DegreeGrid(LINKS, 4096), np.array([2_000_000]), np.array([250]), 0.0)
    every = np.arange(250, 4097)
    best = float(block_seconds(LINKS, np.full(len(every), 2_000_000), every).min())
    assert best <= target <= 1.01 * best


@examples(33, 100)
@given(data=st.data(), count=st.integers(1, 12))
def test_shares_follow_speed_within_capacity(data: st.DataObject, count: int) -> None:
    capacity = np.array(data.draw(st.lists(st.integers(1, 60), min_size=count, max_size=count)))
    speeds = np.array(data.draw(st.lists(st.sampled_from([0.3, 1.0, 2.5]), min_size=count, max_size=count)))
    length = data.draw(st.integers(count, int(max(count, capacity.sum()))))
    if length > capacity.sum():
        return
    tokens = shares(length, speeds, capacity)
    assert tokens.sum() == length
    assert (tokens >= 1).all()
    assert (tokens <= capacity).all()


def test_shares_of_equal_members_and_of_a_full_one() -> None:
    assert shares(10, np.ones(4), np.full(4, 100)).tolist() == [3, 3, 2, 2]
    assert shares(90, np.array([1.0, 2.0, 6.0]), np.array([100, 100, 30])).tolist() == [20, 40, 30]


def test_the_published_loop_does_not_count_waiting_and_the_greedy_one_does() -> None:
    """24 tokens take 8 s on ranks 0 to 2. Then 16 tokens need two ranks, and only rank 3 is behind: ranks 0 and 3 run
    them until 16 s.

    To the published loop, rank 3 has worked for 8 s, and it gets the last group as the third rank in turn. The greedy
    loop knows that rank 3 is free at 16 s only, and gives the group to rank 2.
    """
    lengths, cluster = [24, 16, 7, 6, 5], Cluster.uniform(4, 8)
    cost = CostModel(attention_seconds_per_pair=0.0, token_seconds=1.0)
    ranks = {}
    for name, planner in (("paper", partial(paper_plan, delta_seconds=0.0)), ("greedy", greedy_plan)):
        plan = planner(lengths, cluster=cluster, cost=cost, num_buckets=1)
        groups = range(plan.num_groups)
        ranks[name] = {lengths[plan.sequences_of(group)[0]]: plan.ranks_of(group).tolist() for group in groups}
    assert ranks["paper"] == {24: [0, 1, 2], 16: [0, 3], 7: [1], 6: [2], 5: [3]}
    assert ranks["greedy"] == {24: [0, 1, 2], 16: [0, 3], 7: [1], 6: [2], 5: [2]}


def test_naive_deals_in_the_order_of_arrival() -> None:
    """Algorithm 1 by hand: capacity 10 on 3 ranks; 4 and 6 share a pack, which comes when 4 does."""
    plan = naive_plan([4, 15, 8, 6, 25], cluster=Cluster.uniform(3, 10))
    groups = [(plan.sequences_of(group).tolist(), plan.ranks_of(group).tolist()) for group in range(plan.num_groups)]
    assert groups == [([0, 3], [0]), ([1], [1, 2]), ([2], [0]), ([4], [1, 2, 0])]
