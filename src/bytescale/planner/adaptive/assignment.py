"""Assigns ranks to groups whose time is known: wide groups on whole nodes, narrow groups inside one node.

Wide groups, in the order of their starts, take ranks that are free at their start. They prefer nodes that are free as a
whole, so that as few nodes as possible are divided, and ranks that became free last, so that little time is idle. They
leave *gaps*: ranks of one node that are free from the same moment until the same moment::

    node of 4 ranks   |aaaaaaaaaaaa|xxx|bbbbbbbbb|            x: a gap of 3 ranks, between a and b
                      |aaaaaaaaaaaa|xxx|bbbbbbbbb|            y: a gap of 1
                      |aaaaaaaaaaaa|xxx|bbbbbbbbb|            and what follows b and c is a gap of 3 and one of 1, up
                      |yyy|ccccccccccccccccc|                 to the target

Narrow groups, widest first, go to the earliest gap into which they fit, and cut it in two. A group that fits into no
gap is placed at the end, on the node that first has enough free ranks.

Shape letters: G groups, E sum of their degrees, R ranks.
"""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.planner.adaptive.placement import Placement

FloatArray = NDArray[np.float64]


class Reservation(NamedTuple):
    """The time and the number of ranks of one group."""

    start: float  # seconds; unused for a narrow group
    seconds: float
    item: int  # which of the sequences
    degree: int


class Assignment(NamedTuple):
    """Groups in the order of their starts."""

    items: IntArray  # [G] which of the sequences
    placement: Placement
    holes: FloatArray  # [E] seconds for which each member is free before the group starts


def assign(
    wide: list[Reservation], narrow: list[Reservation], *, num_ranks: int, node: int, target: float, same: float
) -> Assignment:
    """Choose ranks for every group.

    Args:
        wide: groups that together never need more than all ranks at one moment.
        narrow: groups of at most ``node`` ranks each, widest first.
        num_ranks: R.
        node: consecutive ranks of a node.
        target: seconds; narrow groups go into gaps up to this time.
        same: seconds by which a rank may become free after a group's start.
    """
    free_at, gaps = np.zeros(num_ranks), _Gaps(node)
    placed: list[tuple[float, int, float, IntArray]] = []  # (start, item, seconds, ranks)
    for start, seconds, item, degree in sorted(wide, key=attrgetter("start")):
        ranks = _choose(free_at, start + same, degree, node if narrow else 1)
        start = float(free_at[ranks].max())
        if narrow:
            gaps.add(ranks, free_at[ranks], start)
        free_at[ranks] = start + seconds
        placed.append((start, item, seconds, ranks))
    if narrow:
        gaps.add(np.arange(num_ranks), free_at, target)
        placed += gaps.fill(narrow)
    placed.sort(key=itemgetter(0))
    return _replay(placed, num_ranks, node)


def _choose(free_at: FloatArray, until: float, degree: int, node: int) -> IntArray:
    """``degree`` ranks that are free by ``until``, in rising order; if too few are, the ranks that are free first."""
    ready = np.flatnonzero(free_at <= until)
    if len(ready) < degree:
        return np.sort(np.argsort(free_at, kind="stable")[:degree])
    ready = ready[np.argsort(-free_at[ready], kind="stable")]
    if node == 1 or len(ready) == degree:
        return np.sort(ready[:degree])
    nodes, first, counts = np.unique(ready // node, return_index=True, return_counts=True)
    fullest = np.lexsort((first, -counts))  # of equally full ones, those that became free last
    whole = int(np.searchsorted(np.cumsum(counts[fullest]), degree, side="right"))
    rest = degree - int(counts[fullest[:whole]].sum())
    chosen = ready[np.isin(ready // node, nodes[fullest[:whole]])]
    if rest:
        others = fullest[whole:]
        others = others[counts[others] >= rest]
        smallest = nodes[others[counts[others].argmin()]]
        chosen = np.append(chosen, ready[ready // node == smallest][:rest])
    return np.sort(chosen)


class _Gaps:
    """Ranks of one node that are free from one moment until another."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.ranks: list[IntArray] = []
        self.start: list[float] = []
        self.stop: list[float] = []

    def add(self, ranks: IntArray, free_at: FloatArray, stop: float) -> None:
        """Add the gaps of ``ranks``, which are free from ``free_at`` (one time for each) until ``stop``."""
        later = np.flatnonzero(free_at < stop)
        ranks, free_at = ranks[later], free_at[later]
        order = np.lexsort((ranks, free_at, ranks // self.node))
        ranks, free_at = ranks[order], free_at[order]
        cuts = np.flatnonzero((np.diff(free_at) != 0) | (np.diff(ranks // self.node) != 0)) + 1
        for part in np.split(np.arange(len(ranks)), cuts):
            if len(part):
                self.ranks.append(ranks[part])
                self.start.append(float(free_at[part[0]]))
                self.stop.append(stop)

    def fill(self, groups: list[Reservation]) -> list[tuple[float, int, float, IntArray]]:
        """(start, item, seconds, ranks) of each group. One that fits nowhere has start inf and arbitrary ranks."""
        count, room = len(self.ranks), len(self.ranks) + len(groups)
        start, stop, width = np.full(room, np.inf), np.zeros(room), np.zeros(room, np.int64)
        start[:count], stop[:count], width[:count] = self.start, self.stop, [len(ranks) for ranks in self.ranks]
        ranks, filled = [*self.ranks], []
        for _, seconds, item, degree in groups:
            fits = (width >= degree) & (start + seconds <= stop)
            place = int(np.where(fits, start, np.inf).argmin())
            if not fits[place]:
                filled.append((np.inf, item, seconds, np.zeros(degree, np.int64)))
                continue
            begins, members, rest = float(start[place]), ranks[place][:degree], ranks[place][degree:]
            filled.append((begins, item, seconds, members))
            if len(rest):  # the other ranks keep their gap; the members get a later gap of their own
                ranks[place], width[place] = rest, len(rest)
                ranks.append(members)
                start[count], stop[count], width[count] = begins + seconds, stop[place], degree
                count += 1
            else:
                start[place] += seconds
        return filled


def _replay(placed: list[tuple[float, int, float, IntArray]], num_ranks: int, node: int) -> Assignment:
    """Run all groups in order. Groups without ranks take those of the node that first has enough of them."""
    free_at, members, holes = np.zeros(num_ranks), [np.zeros(0, np.int64)], [np.zeros(0)]
    for start, _, seconds, ranks in placed:
        if start == np.inf:
            ranks = _first_of_a_node(free_at, len(ranks), node)
        begins = free_at[ranks].max()
        holes.append(begins - free_at[ranks])
        free_at[ranks] = begins + seconds
        members.append(ranks)
    return Assignment(
        items=np.array([item for _, item, _, _ in placed], dtype=np.int64),
        placement=Placement(
            ranks=np.concatenate(members),
            degrees=np.array([len(ranks) for ranks in members[1:]], dtype=np.int64),
            free_at=free_at,
        ),
        holes=np.concatenate(holes),
    )


def _first_of_a_node(free_at: FloatArray, degree: int, node: int) -> IntArray:
    """``degree`` ranks of the node that first has so many free."""
    times = np.append(free_at, np.full(-len(free_at) % node, np.inf)).reshape(-1, node)
    first = int(np.partition(times, degree - 1, axis=1)[:, degree - 1].argmin())
    return np.sort(first * node + np.argsort(times[first], kind="stable")[:degree])
