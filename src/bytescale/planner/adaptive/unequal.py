"""Ranks that differ in speed and capacity: each member of a group gets tokens in proportion to its speed.

A member never gets more than its capacity; the others share the rest. The shares are the group's weights.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan.nodes import crossings
from bytescale.plan.plan import concatenated_ranges
from bytescale.plan.tiles import shares_of
from bytescale.planner.adaptive.degrees import DegreeGrid, Rectangles
from bytescale.planner.adaptive.effort import MANY, MULTIPLE, SHORT, WIDE


def unequal_blocks(
    tried: DegreeGrid, lengths: IntArray, fewest: IntArray, longest: float, cluster: Cluster
) -> Rectangles:
    """The groups of ``lengths`` ``[G]``, longest first. If possible, none computes for more than ``longest`` seconds.

    ``fewest`` ``[G]`` is a lower bound of the ranks that hold each.
    """
    cost = tried.cost
    capacity, speed = (
        np.concatenate(([0], np.cumsum(part))).tolist() for part in (cluster.capacity_tokens, cluster.speeds)
    )
    works, tokens = cost.work_seconds(lengths).tolist(), lengths.tolist()
    node = cost.ranks_per_node
    members = list(zip(cluster.capacity_tokens.tolist(), cluster.speeds.tolist(), strict=True))
    slowest, fullest = float(cluster.speeds.min()), float((cluster.speeds / cluster.capacity_tokens).max())

    def slowest_member(group: int, first: int, end: int) -> float:
        """Tokens over speed of the member that ends last."""
        even = tokens[group] / (speed[end] - speed[first])
        if even * slowest >= MANY and even * fullest <= 1:  # all shares are in proportion to speed
            return float(even)
        if even * slowest >= MANY:
            return last_end(tokens[group], members[first:end])
        speeds, capacity = cluster.speeds[first:end], cluster.capacity_tokens[first:end]
        return float((shares(tokens[group], speeds, capacity) / speeds).max())

    def grow(group: int, first: int, most: int, room: float | None) -> tuple[int, float]:
        work, length, stop = works[group], tokens[group], first + most
        holding = bisect_left(capacity, capacity[first] + length)
        if holding > stop:
            return 0, float("inf")
        room = max(min(room or 0.0, longest) - cost.micro_batch_seconds, SHORT * longest)
        in_time = bisect_left(speed, (speed[first] + work / room) * (1 - 1e-12))
        end = max(holding, in_time)
        if end - first >= WIDE and cost.row_bytes_per_token is not None:
            end = first - (first - end) // MULTIPLE * MULTIPLE
        end = min(end, stop, first + length)  # every member gets a token
        compute = work * slowest_member(group, first, end) / length
        shapes, far = cost.shapes if end - first >= WIDE else (1,), first // node != (end - 1) // node
        exposed = tried.exposed(length, end - first, far, shapes)
        return end - first, compute + exposed + cost.micro_batch_seconds

    return Rectangles(np.arange(len(lengths)), fewest, np.full(len(lengths), np.inf), grow, speed, node=1)


def grids(
    lengths: IntArray, degrees: IntArray, ranks: IntArray, cluster: Cluster, cost: CostModel
) -> tuple[IntArray, IntArray, IntArray]:
    """``[G]`` columns, ``[E]`` ranks and ``[E]`` weights of groups of unequal members, in their best shapes.

    Members of like speed stand in one row, and every second row is turned around: all columns have about equal shares.

    Arguments as in ``trial.group_shapes``.
    """
    starts = np.cumsum(degrees) - degrees
    places = np.arange(len(ranks))
    own, fastest_first = np.empty((2, len(places)), dtype=np.int64)
    for group, (start, degree) in enumerate(zip(starts.tolist(), degrees.tolist(), strict=True)):
        span = slice(start, start + degree)
        own[span] = shares(int(lengths[group]), cluster.speeds[ranks[span]], cluster.capacity_tokens[ranks[span]])
        fastest_first[span] = start + np.argsort(-own[span], kind="stable")
    columns, members = np.ones(len(lengths), dtype=np.int64), places.copy()
    tokens, squares = lengths.astype(np.float64), cost.squares_of(lengths)
    best, is_open = np.full(len(lengths), np.inf), np.ones(len(lengths), dtype=bool)
    for tried in cost.shapes:
        some = np.flatnonzero(is_open & (degrees % tried == 0) & ((tried == 1) | (2 * tried <= degrees)))
        if not len(some):
            continue
        sizes, heads = degrees[some], starts[some]
        here, first = concatenated_ranges(heads, heads + sizes), np.repeat(heads, sizes)
        row, column = (here - first) // tried, (here - first) % tried
        turned = first + row * tried + np.where(row % 2 == 1, tried - 1 - column, column)
        order = here if tried == 1 else fastest_first[turned]
        shape = ranks[order], sizes, np.full(len(some), tried)
        part, far = shares_of(own[order], *shape[1:]), crossings(*shape, ranks_per_node=cost.ranks_per_node)
        compute = np.repeat(cost.compute_seconds(tokens[some], 0.0), sizes) * part.own
        compute += np.repeat(cost.compute_seconds(0.0, squares[some]), sizes) * part.tile
        exposed = cost.exposed_seconds(tokens[some], squares[some], sizes, far.columns, tried, far.rows)
        slowest = np.maximum.reduceat(compute / cluster.speeds[shape[0]], np.cumsum(sizes) - sizes)
        better = slowest + exposed < best[some]
        best[some] = np.minimum(best[some], slowest + exposed)
        columns[some[better]] = tried
        taken = np.repeat(better, sizes)
        members[here[taken]] = order[taken]
        is_open[some] = exposed > 0.0
    return columns, ranks[members], own[members]


def last_end(length: float, members: list[tuple[int, float]]) -> float:
    """Tokens over speed of the ``(capacity, speed)`` that ends last: ``shares`` without rounding, in plain floats."""
    there = members
    while there:
        level = length / sum(speed for _, speed in there)
        left = [member for member in there if level * member[1] <= member[0]]
        if len(left) == len(there):
            return level
        length -= sum(tokens for tokens, _ in there) - sum(tokens for tokens, _ in left)
        there = left
    return max(tokens / speed for tokens, speed in members)


def shares(length: int, speeds: FloatArray, capacity: IntArray) -> IntArray:
    """``[N]`` tokens of each member, at least 1 where there are enough, summing to ``length``.

    Tokens are in proportion to speed. Members whose capacity is below their share are filled, and the others share the
    rest. ``length`` is at most the sum of the capacities.
    """
    ideal = speeds * length / speeds.sum()
    open_to = np.ones(len(speeds), dtype=bool)
    while (full := open_to & (ideal > capacity)).any():
        open_to &= ~full
        rest = length - capacity[~open_to].sum()
        ideal = np.where(open_to, speeds * rest / max(speeds[open_to].sum(), 1e-300), capacity)
    tokens = np.minimum(np.maximum(np.floor(ideal + 1e-9).astype(np.int64), min(1, length // len(speeds))), capacity)
    # Tokens that rounding left over go, one each, to the members furthest below their ideal share. (In the rare case of
    # too many tokens, the members furthest above it give back one each.)
    while missing := length - int(tokens.sum()):
        step = 1 if missing > 0 else -1
        may = tokens < capacity if step > 0 else tokens > 1
        below = np.argsort(np.where(may, step * (tokens - ideal), np.inf), kind="stable")
        tokens[below[: min(abs(missing), int(may.sum()))]] += step
    return tokens
