"""How many ranks a sequence takes to end within a given time, and how long it takes there.

Groups that fit into a node are assumed to stay in one.
Shape letter: L sequences that may have to be shared, longest first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.cost import CostModel
from bytescale.planner.adaptive.effort import GRID, TRIES
from bytescale.planner.order import rising

AT_ONCE = 96
"""Sequences for which the grid is computed at once: its arrays stay in the processor's cache."""
_NEVER = np.iinfo(np.int64).max


class Rectangles(NamedTuple):
    """The groups that are placed, widest first."""

    items: IntArray  # [G] which of the sequences
    degrees: IntArray  # [G] fewest ranks of each, descending
    seconds: FloatArray  # [G] time of each on so many ranks; infinite where that depends on the ranks
    grow: Callable[[int, int, int, float | None], tuple[int, float]]
    """``grow(group, first, most, room)`` is the fewest consecutive ranks, from ``first`` on and at most ``most``, on
    which the group ends within ``room`` seconds, and its time there. If none do, it is the fastest number of ranks; if
    ``most`` ranks cannot hold it, (0, infinity). Where ``room`` is None, it is all ``most`` ranks. On ranks that differ
    (``unequal``), compute alone decides the number, so exposed messages may make the group late."""
    speed: Sequence[float]  # [R + 1] sum of the speeds of the ranks before each
    node: int  # groups of at most this many ranks stay inside a node of so many; 1: nodes do not matter


def is_ideal(cost: CostModel) -> bool:
    """Whether communication is free."""
    no_latency = cost.latency_seconds(False) == cost.latency_seconds(True) == cost.ring_message_seconds == 0
    no_transfers = cost.ring_bytes_per_token == cost.state_bytes == 0 or bool(
        np.isinf(cost.intra_node_bytes_per_second) and np.isinf(cost.inter_node_bytes_per_second)
    )
    return no_latency and no_transfers


def block_seconds(cost: CostModel, lengths: IntArray, degrees: IntArray) -> FloatArray:
    """``[L]`` seconds of each sequence on ``degrees`` ranks, in their best shape."""
    lengths, degrees = np.asarray(lengths, dtype=np.float64), np.asarray(degrees)
    squares = cost.squares_of(lengths)
    exposed = cost.best_shape(lengths, squares, degrees, degrees > cost.ranks_per_node).seconds
    return cost.compute_seconds(lengths, squares, degrees) + exposed + cost.micro_batch_seconds


def _shaped_seconds(cost: CostModel, lengths: FloatArray, degrees: IntArray, columns: ArrayLike) -> FloatArray:
    """Seconds of sequences on ``degrees`` ranks in so many ``columns``, which divide them. Broadcasts."""
    squares = cost.squares_of(lengths)
    node = cost.ranks_per_node
    exposed = cost.shape_seconds(lengths, squares, degrees, columns, degrees > node, node).seconds
    return cost.compute_seconds(lengths, squares, degrees) + exposed + cost.micro_batch_seconds


class DegreeGrid:
    """``GRID`` degrees, from fewest to all, of sequences near their shortest possible time.

    Every length is tried once, however many limits are asked for. Degrees faster than every smaller one are kept.
    """

    def __init__(self, cost: CostModel, num_ranks: int) -> None:
        self.cost, self.num_ranks = cost, num_ranks
        self.exposed: dict[tuple[int, int, bool], float] = {}  # length, ranks, leaves a node: seconds (``unequal``)
        self._kept: dict[int, tuple[FloatArray, IntArray]] = {}  # length: minus the seconds, rising, and the degrees

    def within(self, lengths: IntArray, fewest: IntArray, seconds: float) -> tuple[IntArray, FloatArray]:
        """``degrees_within`` of these degrees alone. ``fewest`` may not differ between sequences of one length."""
        ranks = dict(zip(lengths.tolist(), fewest.tolist(), strict=True))
        missing = [length for length in ranks if length not in self._kept]
        for start in range(0, len(missing), AT_ONCE):
            some = missing[start : start + AT_ONCE]
            self._try(some, np.array([ranks[length] for length in some]))
        kept = [self._kept[length] for length in lengths.tolist()]
        at = [min(bisect_left(taken, -seconds), len(taken) - 1) for taken, _ in kept]
        pairs = list(zip(kept, at, strict=True))
        return np.array([row[1][at] for row, at in pairs]), -np.array([row[0][at] for row, at in pairs])

    def _try(self, lengths: list[int], fewest: IntArray) -> None:
        steps = (self.num_ranks / fewest) ** (np.arange(GRID) / (GRID - 1))[:, None]
        columns = _columns(self.cost, self.num_ranks)[:, None, None]  # [C, 1, 1]
        degrees = _multiples(np.round(fewest * steps).astype(np.int64), columns)  # [C, GRID, L]
        degrees = np.minimum(degrees, self.num_ranks // columns * columns)
        taken = _shaped_seconds(self.cost, np.array(lengths, np.float64), degrees, columns)
        taken = np.where(degrees < fewest, np.inf, taken).reshape(-1, len(lengths))
        degrees = degrees.reshape(-1, len(lengths))
        by_degree = np.argsort(degrees, axis=0, kind="stable")
        degrees, taken = (np.take_along_axis(part, by_degree, axis=0) for part in (degrees, taken))
        least = np.minimum.accumulate(taken, axis=0)
        is_faster = taken < np.concatenate((np.full((1, len(lengths)), np.inf), least[:-1]))
        for item, length in enumerate(lengths):
            kept = is_faster[:, item]
            self._kept[length] = -taken[kept, item], degrees[kept, item]


def degrees_within(
    tried: DegreeGrid, lengths: IntArray, fewest: IntArray, seconds: float
) -> tuple[IntArray, FloatArray]:
    """Fewest ranks on which each sequence ends within ``seconds``, and its time there, both ``[L]``.

    Start from the degree that compute alone requires, and add ranks for the exposed time, in every number of columns.
    If that finds none, try a grid of degrees. A sequence that no degree ends in time takes its fastest degree.

    ``lengths [L]`` are in tokens, and ``fewest [L]`` the ranks that hold each.
    """
    cost, num_ranks = tried.cost, tried.num_ranks
    work = cost.work_seconds(lengths)
    room = max(seconds - cost.micro_batch_seconds, 1e-3 * seconds)
    degrees = np.clip(np.ceil(work / room * (1 - 1e-12)), fewest, num_ranks).astype(np.int64)
    if is_ideal(cost):
        return degrees, work / degrees + cost.micro_batch_seconds
    limit = seconds * (1 + 1e-9)
    tokens = lengths.astype(np.float64)
    taken = _shaped_seconds(cost, tokens, degrees, 1)
    late = np.flatnonzero(taken > limit)
    if len(late):
        degrees[late], taken[late] = _with_exposed(cost, tokens[late], degrees[late], num_ranks, seconds)
        late = late[taken[late] > limit]
    if len(late):
        degrees[late], taken[late] = tried.within(lengths[late], fewest[late], seconds)
    return degrees, taken


def _with_exposed(
    cost: CostModel, lengths: FloatArray, degrees: IntArray, num_ranks: int, seconds: float
) -> tuple[IntArray, FloatArray]:
    """``degrees_within`` from the ranks that compute needs, ``degrees`` ``[L]``; of a late sequence the fastest."""
    columns = _columns(cost, num_ranks)[:, None]  # [C, 1]
    work, most = cost.work_seconds(lengths), num_ranks // columns * columns
    room = max(seconds - cost.micro_batch_seconds, 1e-3 * seconds)
    limit = seconds * (1 + 1e-9)
    asked = np.minimum(_multiples(np.broadcast_to(degrees, (len(columns), len(degrees))), columns), most)  # [C, L]
    taken = _shaped_seconds(cost, lengths, asked, columns)
    for _ in range(TRIES):
        is_late = taken > limit
        if not is_late.any():
            break
        left = np.maximum(room - (taken - cost.micro_batch_seconds - work / asked), 0.05 * room)
        more = _multiples(np.maximum(np.ceil(work / left), asked + 1).astype(np.int64), columns)
        asked = np.where(is_late, np.minimum(more, most), asked)
        taken = _shaped_seconds(cost, lengths, asked, columns)
    taken = np.where(asked < degrees, np.inf, taken)
    in_time = taken <= limit
    chosen = np.where(in_time.any(axis=0), np.where(in_time, asked, _NEVER).argmin(axis=0), taken.argmin(axis=0))
    items = np.arange(len(degrees))
    return asked[chosen, items], taken[chosen, items]


def fastest_seconds(tried: DegreeGrid, length: int, fewest: int) -> float:
    """Seconds of a sequence on its fastest number of ranks, from ``fewest`` on: any for rings, some for grids."""
    every = np.arange(fewest, tried.num_ranks + 1)
    ring = float(_shaped_seconds(tried.cost, np.full(len(every), float(length)), every, 1).min())
    if tried.cost.row_bytes_per_token is None:
        return ring
    _, taken = tried.within(np.array([length]), np.array([fewest]), 0.0)
    return min(ring, float(taken[0]))


def _columns(cost: CostModel, num_ranks: int) -> IntArray:
    """Numbers of columns that a group of at most R ranks may have."""
    return np.array([columns for columns in cost.shapes if 2 * columns <= max(num_ranks, 2)])


def _multiples(degrees: IntArray, columns: IntArray) -> IntArray:
    """The next multiples of ``columns``, of at least two rows; rings have any number of ranks."""
    return np.maximum(-(-degrees // columns), np.where(columns > 1, 2, 1)) * columns


def grow(cost: CostModel, length: int, work: float, degree: int, most: int, room: float) -> tuple[int, float]:
    """The fewest ranks, more than ``degree`` and at most ``most``, that end within ``room`` seconds; the time there.

    If none do, the faster of ``degree`` and ``most`` ranks. ``work``: seconds of the sequence on one rank.
    """
    ideal, launch = is_ideal(cost), cost.micro_batch_seconds
    shapes = cost.shapes[:1] if ideal else cost.shapes

    def seconds_on(ranks: int, columns: int) -> float:
        return work / ranks + launch + (0.0 if ideal else cost.exposed_of_one(length, ranks, columns))

    def fewest_in(columns: int, below: int) -> tuple[int, float] | None:
        asked, beside_compute = degree, 0.0
        for _ in range(TRIES):
            if beside_compute >= room:
                return None
            asked = max(asked + 1, -int(-work // (room - beside_compute)), 2 * columns if columns > 1 else 1)
            asked = -(-asked // columns) * columns
            if asked > below:
                return None
            height = seconds_on(asked, columns)
            if height <= room * (1 + 1e-9):
                return asked, height
            beside_compute = height - work / asked
        return None

    best: tuple[int, float] | None = None
    for columns in shapes if room > 0 else ():
        best = fewest_in(columns, most if best is None else best[0] - 1) or best
    if best is not None:
        return best

    def fastest_of(ranks: int) -> float:
        return min(
            seconds_on(ranks, columns) for columns in shapes if ranks % columns == 0 and ranks >= 2 * columns - 1
        )

    fewest, all_of_it = fastest_of(degree), fastest_of(most)
    return (degree, fewest) if fewest <= all_of_it else (most, all_of_it)


def equal_blocks(tried: DegreeGrid, lengths: IntArray, fewest: IntArray, longest: float) -> Rectangles:
    """The groups of ``lengths`` ``[L]`` on equal ranks, each on the fewest that end it within ``longest`` seconds.

    ``fewest`` ``[L]`` are the ranks that hold each.
    """
    cost, num_ranks = tried.cost, tried.num_ranks
    degrees, seconds = degrees_within(tried, lengths, fewest, longest)
    order = rising(degrees.max(initial=1) - degrees)
    degrees, lengths = degrees[order], lengths[order]
    tokens, works, widths = lengths.tolist(), cost.work_seconds(lengths).tolist(), degrees.tolist()
    node = 1 if is_ideal(cost) else cost.ranks_per_node

    def wider(group: int, first: int, most: int, room: float | None) -> tuple[int, float]:
        del first  # equal ranks
        if room is None:
            return grow(cost, tokens[group], works[group], most, most, 0.0)
        return grow(cost, tokens[group], works[group], widths[group], most, room)

    return Rectangles(order, degrees, seconds[order], wider, range(num_ranks + 1), node)
