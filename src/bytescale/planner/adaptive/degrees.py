"""How many ranks a sequence takes to end within a given time, and how long it takes there.

Groups that fit into a node are assumed to stay in one.
Shape letter: L sequences that may have to be shared, longest first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.cost.model import CostModel
from bytescale.planner.adaptive.effort import AT_ONCE, GRID
from bytescale.planner.batch import rising


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
    """``GRID`` degrees, from the fewest to all, of sequences near their shortest possible time.

    Every length is tried once, however many limits are asked for. Degrees faster than every smaller one are kept.
    """

    def __init__(self, cost: CostModel, num_ranks: int) -> None:
        self.cost, self.num_ranks, self.is_ideal = cost, num_ranks, is_ideal(cost)
        self._exposed: dict[tuple[int, int, bool], float] = {}  # length, ranks, leaves a node: seconds
        self._kept: dict[int, tuple[list[float], list[int]]] = {}  # length: minus the seconds, rising, and the degrees

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

    def grow(self, length: int, fewest: int, degree: int, most: int, room: float) -> tuple[int, float]:
        """The fewest ranks, from ``degree + 1`` to ``most``, that end within ``room`` seconds, and the time there.

        If none do, the fastest number of ranks. ``fewest``: the ranks that hold the sequence.
        """
        if self.is_ideal:
            work, launch = float(self.cost.work_seconds(length)), self.cost.micro_batch_seconds
            needed = -int(-work // (room - launch)) if room > launch else most
            return (ranks := min(max(degree + 1, needed), most)), work / ranks + launch
        if length not in self._kept:
            self._try([length], np.array([fewest]))
        taken, degrees = self._kept[length]
        last = bisect_right(degrees, most) - 1
        at = min(max(bisect_left(taken, -room * (1 + 1e-9)), bisect_right(degrees, degree)), last)
        return (degrees[at], -taken[at]) if degrees[at] > degree else (degree, self.seconds(length, degree))

    def seconds(self, length: int, degree: int) -> float:
        """The time of a sequence on so many ranks, in their best shape."""
        compute = float(self.cost.work_seconds(length)) / degree + self.cost.micro_batch_seconds
        far, shapes = degree > self.cost.ranks_per_node, [c for c in self.cost.shapes if degree >= 2 * c - 1]
        return compute + (0.0 if self.is_ideal else self.exposed(length, degree, far, shapes))

    def exposed(self, length: int, degree: int, far: bool, shapes: Sequence[int]) -> float:
        """The part of it that compute does not hide. ``far``: whether the group leaves a node; ``shapes``: columns."""
        if (length, degree, far) not in self._exposed:
            dividing = (columns for columns in shapes if degree % columns == 0)
            of_shapes = (self.cost.exposed_of_one(length, degree, columns, far=far) for columns in dividing)
            self._exposed[length, degree, far] = min(of_shapes)
        return self._exposed[length, degree, far]

    def _try(self, lengths: list[int], fewest: IntArray) -> None:
        steps = (self.num_ranks / fewest) ** (np.arange(GRID) / (GRID - 1))[:, None]
        # Numbers of columns that a group of at most R ranks may have, [C, 1, 1], and the next multiples of them, of at
        # least two rows, [C, GRID, L]; rings have any number of ranks.
        columns = np.array([one for one in self.cost.shapes if 2 * one <= max(self.num_ranks, 2)])[:, None, None]
        degrees = np.round(fewest * steps).astype(np.int64)
        degrees = np.maximum(-(-degrees // columns), np.where(columns > 1, 2, 1)) * columns
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
            self._kept[length] = (-taken[kept, item]).tolist(), degrees[kept, item].tolist()


def degrees_within(
    tried: DegreeGrid, lengths: IntArray, fewest: IntArray, seconds: float
) -> tuple[IntArray, FloatArray]:
    """Fewest ranks on which each sequence ends within ``seconds``, and its time there, both ``[L]``.

    A ring of as many ranks as compute alone requires often does. Otherwise the grid of degrees is asked. A sequence
    that no degree ends in time takes its fastest degree.

    ``lengths [L]`` are in tokens, and ``fewest [L]`` the ranks that hold each.
    """
    cost, num_ranks = tried.cost, tried.num_ranks
    work = cost.work_seconds(lengths)
    room = max(seconds - cost.micro_batch_seconds, 1e-3 * seconds)
    degrees = np.clip(np.ceil(work / room * (1 - 1e-12)), fewest, num_ranks).astype(np.int64)
    if tried.is_ideal:
        return degrees, work / degrees + cost.micro_batch_seconds
    taken = _shaped_seconds(cost, lengths.astype(np.float64), degrees, 1)
    late = np.flatnonzero(taken > seconds * (1 + 1e-9))
    if len(late):
        degrees[late], taken[late] = tried.within(lengths[late], fewest[late], seconds)
    return degrees, taken


def fastest_seconds(tried: DegreeGrid, length: int, fewest: int) -> float:
    """Seconds of a sequence on its fastest number of ranks, from ``fewest`` on: any for rings, some for grids."""
    every = np.arange(fewest, tried.num_ranks + 1)
    ring = float(_shaped_seconds(tried.cost, np.full(len(every), float(length)), every, 1).min())
    if tried.cost.row_bytes_per_token is None:
        return ring
    _, taken = tried.within(np.array([length]), np.array([fewest]), 0.0)
    return min(ring, float(taken[0]))


def equal_blocks(tried: DegreeGrid, lengths: IntArray, fewest: IntArray, longest: float) -> Rectangles:
    """The groups of ``lengths`` ``[L]`` on equal ranks, each on the fewest that end it within ``longest`` seconds.

    ``fewest`` ``[L]`` are the ranks that hold each.
    """
    num_ranks = tried.num_ranks
    degrees, seconds = degrees_within(tried, lengths, fewest, longest)
    order = rising(degrees.max(initial=1) - degrees)
    degrees, tokens, least = degrees[order], lengths[order].tolist(), fewest[order].tolist()
    widths = degrees.tolist()
    node = 1 if tried.is_ideal else tried.cost.ranks_per_node

    def wider(group: int, first: int, most: int, room: float | None) -> tuple[int, float]:
        del first  # equal ranks
        if room is None:
            return most, tried.seconds(tokens[group], most)
        return tried.grow(tokens[group], least[group], widths[group], most, room)

    return Rectangles(order, degrees, seconds[order], wider, range(num_ranks + 1), node)
