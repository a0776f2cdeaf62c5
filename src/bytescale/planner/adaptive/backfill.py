"""Schedules the shared groups in time first and chooses their ranks afterwards: cluster schedulers call it backfilling.

``blocks`` stacks groups on consecutive ranks. Ranks left over beside a block can only take groups that are at most as
wide. If the longest sequences take a large part of all ranks, most of these strips are a few ranks wide, and too few
sequences are that narrow. But the members of a group need not be neighbours. Without that restriction it only matters
*how many* ranks are free and for how long. Each group reserves the earliest hole that it fits into::

    rank 0  |aaaaaaaaaaaa|cccccccc|      The widest groups come first: a takes five ranks, c and d take three, b and
    rank 1  |aaaaaaaaaaaa|cccccccc|      e take two. Each group starts at the first moment from which on enough ranks
    rank 2  |aaaaaaaaaaaa|cccccccc|      stay free for the whole time of the group. For d this is the end of a: c
    rank 3  |aaaaaaaaaaaa|dddddd|        leaves two of a's ranks free, and rank 5 is the third one. Narrow groups come
    rank 4  |aaaaaaaaaaaa|dddddd|        last and fill the holes.
    rank 5  |bbbbbbb|eeee|dddddd|
    rank 6  |bbbbbbb|eeee|

A group that fits nowhere before the target *grows*: it takes just enough more ranks to end in time. Which group has to
grow depends on the order. So the group that grew at the greatest cost, or was late all the same, moves a little earlier
in the order, and all groups are scheduled again, until no group grows much or ``ORDERS`` orders were tried ("squeaky
wheel" optimisation).

Unless communication is free, groups that fit into a node have to stay in one node. They are not scheduled here:
``assignment`` puts them into the gaps of the nodes when it chooses ranks.

The idle time between groups usually adds up to a tenth of a per cent. If it is more, and the whole sequences would
therefore end late, whole sequences fill the holes.

Shape letters: G groups, E sum of their degrees, R ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.cost import CostModel
from bytescale.planner.adaptive.assignment import Assignment, Reservation, assign
from bytescale.planner.adaptive.blocks import grow, timer
from bytescale.planner.adaptive.fill import into_holes
from bytescale.planner.adaptive.placement import Placement
from bytescale.planner.adaptive.target import block_seconds, is_ideal

FloatArray = NDArray[np.float64]

ORDERS = 24
"""Orders tried. Each takes some 5 milliseconds for 400 groups, or 20 microseconds if one of the first is late."""
EFFORT = 2**13
"""On many ranks fewer orders are tried: orders times ranks is at most this number, but one order is always tried."""
STEPS_UP = 5
"""A group moves forward by 1 to this many places, in turn."""
LITTLE = 1.01
"""The search ends when the traffic is at most this many times the traffic without growth."""
SAME = 1e-9
"""Times that differ by less than this share of the target count as equal."""


class Backfilled(NamedTuple):
    """Groups in the order of their starts."""

    items: IntArray  # [G] which of the sequences
    placement: Placement
    in_holes: IntArray | None = None
    """``[n]`` the member (place in ``placement.ranks``) that runs each whole sequence before its group; -1: no member.

    None: no member runs any.
    """


def backfill(
    lengths: IntArray,
    degrees: IntArray,
    *,
    cost: CostModel,
    num_ranks: int,
    target: float,
    whole_seconds: FloatArray,
) -> Backfilled:
    """The placement with the least traffic of those found that end in time.

    If none does, groups are placed widest first, each as early as it fits.

    Args:
        lengths: ``[G]`` tokens.
        degrees: ``[G]`` fewest ranks of each, descending.
        cost: tells the time of a group.
        num_ranks: R.
        target: seconds; the time by which all should end.
        whole_seconds: ``[n]`` time of each other sequence, descending. A placement is in time only if these fit as
            well: after the shared groups up to the target or, if that room is too small, also in holes before shared
            groups.
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
            late = asked[reservations[int(np.argmax(extra))].item]  # it would have been late, had it not grown
        place = order.index(late)
        order.insert(max(0, place - 1 - turn % STEPS_UP), order.pop(place))
    if best is not None:
        return best
    reservations, _ = reserve(wide, may_be_late=True)
    found = on_ranks(reservations)
    return Backfilled(found.items, found.placement)


def _with_whole(found: Assignment, seconds: FloatArray, cost: CostModel, target: float) -> Backfilled | None:
    """``found``, with whole sequences in holes if they would be late otherwise; None if they are late even so."""
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
    """Reserve time for the groups in this order.

    Returns the reservations of all groups and None; or, if a group cannot end in time, the reservations of the groups
    before it and that group. ``wider(group, most, seconds)`` returns the fewest ranks, at most ``most``, on which the
    group ends within ``seconds``, and its time there.
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
    """The number of free ranks over time: ``free[k]`` from ``times[k]`` to ``times[k + 1]``, the last one for ever."""

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
        """(time, number of ranks free from then on) of all changes before ``target``."""
        until = bisect_left(self.times, target)
        return list(zip(self.times[:until], self.free[:until], strict=True))

    def take(self, k: int, degree: int, seconds: float) -> None:
        """Reserve ``degree`` ranks from the k-th change on, for ``seconds``."""
        times, free = self.times, self.free
        end = times[k] + seconds
        until = max(bisect_left(times, end - self.same), k + 1)
        if until == len(times) or times[until] > end + self.same:
            times.insert(until, end)
            free.insert(until, free[until - 1])
        for place in range(k, until):
            free[place] -= degree
        for place in (until, k):  # remove entries where the number no longer changes
            if place > 0 and free[place] == free[place - 1]:
                del times[place], free[place]
