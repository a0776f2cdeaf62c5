"""Placing the shared groups in time first, and then on ranks: each reserves the earliest hole that it fits into.

``blocks`` stacks groups like stairs, and a strip between two steps has to be filled by groups that are as narrow as it.
With few ranks for the longest sequences most steps are a few ranks wide, and too few sequences are as narrow. But the
members of a group need not be neighbours. Then only *how many* ranks are free matters, and for how long::

    rank 0  |aaaaaaaaaaaa|cccccccc|      The widest first: a on five ranks, c and d on three, b and e on two. Each
    rank 1  |aaaaaaaaaaaa|cccccccc|      takes the first moment from which on as many ranks as it needs stay free for
    rank 2  |aaaaaaaaaaaa|cccccccc|      as long as it takes. For d that is a's end: c leaves two ranks, and the third
    rank 3  |aaaaaaaaaaaa|dddddd|        is one that a left. The narrow ones come last and fill the holes.
    rank 4  |aaaaaaaaaaaa|dddddd|
    rank 5  |bbbbbbb|eeee|dddddd|        (Schedulers of clusters call it backfilling.)
    rank 6  |bbbbbbb|eeee|

What fits nowhere in time *grows* (more ranks, less time) just enough to. Which group that is depends on the order: the
one that grew at the greatest cost, or was late all the same, is taken a little earlier, and all is placed again, until
nothing grows much or ``ORDERS`` were tried ("squeaky wheel" optimisation).

Groups that fit into a node have to stay in one, where rings are not free. They take no part in this: they go into
what is left of the nodes when ranks are chosen (``assignment``).

What lies idle between groups in the end adds up to a tenth of a per cent. Where it is more, and all others would be
late for it, whole sequences fill the holes.

Shape letters: G groups, E sum of their degrees, R ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bytescale.cost import CostModel
from bytescale.planner.assignment import Assignment, Reservation, assign
from bytescale.planner.blocks import grow, timer
from bytescale.planner.fill import into_holes
from bytescale.planner.placement import Placement
from bytescale.planner.target import block_seconds, is_ideal

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

ORDERS = 24
"""Orders tried, some 5 milliseconds each for 400 groups; 20 microseconds where one of the first is late."""
EFFORT = 2**13
"""On many ranks fewer orders are tried: so many times ranks, but at least one."""
STEPS_UP = 5
"""A group is taken 1 to this many places earlier, in turns."""
LITTLE = 1.01
"""Traffic up to this many times that of no growth ends the search."""
SAME = 1e-9
"""Times closer than this share of the target are one."""


class Backfilled(NamedTuple):
    """Groups by their start."""

    items: IntArray  # [G] which of the sequences
    placement: Placement
    in_holes: IntArray | None = (
        None  # [n] member (place in ``placement.ranks``) that runs each whole sequence before its
    )
    # group; -1: none; None: none runs any


def backfill(
    lengths: IntArray,
    degrees: IntArray,
    *,
    cost: CostModel,
    num_ranks: int,
    target: float,
    whole_seconds: FloatArray,
) -> Backfilled:
    """The placement of least traffic found that is in time; where none is, the widest first, as early as they fit.

    Args:
        lengths: ``[G]`` tokens.
        degrees: ``[G]`` fewest ranks of each, descending.
        cost: tells the time of a group.
        num_ranks: R.
        target: time by which all should end.
        whole_seconds: ``[n]`` time of each other sequence, descending. A placement that is in time leaves room to them
            up to the target; where it would not, as many of them as fit run in holes, before shared groups.
    """
    node = 1 if is_ideal(cost) else cost.ranks_per_node
    seconds = block_seconds(cost, lengths, degrees)
    asked = [
        Reservation(0.0, time, item, degree)
        for item, (time, degree) in enumerate(zip(seconds.tolist(), degrees.tolist(), strict=True))
    ]
    num_wide = int(np.searchsorted(-degrees, -node))
    wide, narrow = asked[:num_wide], asked[num_wide:]
    tokens, works, seconds_on = lengths.tolist(), cost.work_seconds(lengths).tolist(), timer(cost)

    def wider(group: Reservation, most: int, room: float) -> tuple[int, float]:
        return grow(seconds_on, works[group.item], tokens[group.item], group.degree, most, room)

    reserve = partial(_reserve, wider=wider, num_ranks=num_ranks, target=target)
    on_ranks = partial(assign, narrow=narrow, num_ranks=num_ranks, node=node, target=target, same=2 * SAME * target)
    order = list(wide)
    fewest = float((lengths * (degrees - 1)).sum())
    best, least = None, np.inf
    for turn in range(min(ORDERS, max(1, EFFORT // num_ranks))):
        reservations, late = reserve(order)
        if late is None:
            extra = [tokens[r.item] * (r.degree - asked[r.item].degree) for r in reservations]
            if fewest + sum(extra) < least:
                placed = _with_whole(on_ranks(reservations), whole_seconds, cost, target)
                if placed is not None:
                    best, least = placed, fewest + sum(extra)
            if least <= LITTLE * fewest or not any(extra):
                break
            late = asked[reservations[int(np.argmax(extra))].item]  # or would have been, had it not grown
        place = order.index(late)
        order.insert(max(0, place - 1 - turn % STEPS_UP), order.pop(place))
    if best is not None:
        return best
    reservations, _ = reserve(wide, may_be_late=True)
    found = on_ranks(reservations)
    return Backfilled(found.items, found.placement)


def _with_whole(found: Assignment, seconds: FloatArray, cost: CostModel, target: float) -> Backfilled | None:
    """``found``, with whole sequences in holes where they would be late otherwise; None where they are even so."""
    free_at = found.placement.free_at
    room = target * len(free_at) - float(free_at.sum())
    if float(seconds.sum()) <= room:
        return Backfilled(found.items, found.placement)
    in_holes = into_holes(seconds, found.holes - cost.micro_batch_seconds)
    is_in_time = float(seconds[in_holes < 0].sum()) <= room
    return Backfilled(found.items, found.placement, in_holes) if is_in_time else None


def _reserve(
    order: list[Reservation],
    *,
    wider: Callable[[Reservation, int, float], tuple[int, float]],
    num_ranks: int,
    target: float,
    may_be_late: bool = False,
) -> tuple[list[Reservation], Reservation | None]:
    """Reservations for all groups and None; or up to the first group that ends in time nowhere, and that group.

    ``wider``: fewest ranks up to so many on which a group ends within so many seconds, and its time there.
    """
    holes = _Holes(num_ranks, SAME * target)
    reservations: list[Reservation] = []
    for group in order:
        _, seconds, item, degree = group
        hole = holes.earliest(degree, seconds, target)
        if hole is None:
            for start, free in holes.before(target):
                if free > group.degree:
                    grown = wider(group, free, target - start)
                    hole = holes.at(start, *grown, target)
                    if hole is not None:
                        degree, seconds = grown
                        break
        if hole is None and may_be_late:
            hole = holes.earliest(degree, seconds, np.inf)
        if hole is None:
            return reservations, group
        reservations.append(Reservation(holes.times[hole], seconds, item, degree))
        holes.take(hole, degree, seconds)
    return reservations, None


class _Holes:
    """How many ranks are free when: ``free[k]`` from ``times[k]`` until ``times[k + 1]``, the last for ever."""

    def __init__(self, num_ranks: int, same: float) -> None:
        self.times, self.free, self.same = [0.0], [num_ranks], same

    def earliest(self, degree: int, seconds: float, target: float) -> int | None:
        """The first k from which on ``degree`` ranks stay free for ``seconds`` that end by ``target``."""
        times, free, count, k = self.times, self.free, len(self.times), 0
        while k < count:
            if free[k] >= degree:
                end = times[k] + seconds
                if end > target + self.same:
                    return None
                end -= self.same
                last = k + 1
                while last < count and times[last] < end and free[last] >= degree:
                    last += 1
                if last == count or times[last] >= end:
                    return k
                k = last
            k += 1
        return None

    def at(self, start: float, degree: int, seconds: float, target: float) -> int | None:
        """The k that starts at ``start``, if ``degree`` ranks stay free for ``seconds`` that end by ``target``."""
        k, end = bisect_left(self.times, start), start + seconds
        if end > target + self.same:
            return None
        until = max(bisect_left(self.times, end - self.same), k + 1)
        return k if min(self.free[k:until]) >= degree else None

    def before(self, target: float) -> list[tuple[float, int]]:
        """(time, ranks free from then on) of all changes before ``target``."""
        until = bisect_left(self.times, target)
        return list(zip(self.times[:until], self.free[:until], strict=True))

    def take(self, k: int, degree: int, seconds: float) -> None:
        """``degree`` ranks from the k-th change on, for ``seconds``."""
        times, free = self.times, self.free
        end = times[k] + seconds
        until = max(bisect_left(times, end - self.same), k + 1)
        if until == len(times) or times[until] > end + self.same:
            times.insert(until, end)
            free.insert(until, free[until - 1])
        for place in range(k, until):
            free[place] -= degree
        for place in (until, k):  # changes that are none any more
            if place > 0 and free[place] == free[place - 1]:
                del times[place], free[place]
