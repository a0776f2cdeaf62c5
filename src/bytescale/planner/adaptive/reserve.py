"""Schedules the shared groups in time first and chooses their ranks afterwards: cluster schedulers call it backfilling.

``place`` stacks groups on consecutive ranks. Ranks left over beside a block can only take groups that are at most as
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

A group that fits into a node stays in one node, unless communication is free.
The idle time between groups usually adds up to a tenth of a per cent. If it is more, and the whole sequences would
therefore end late, whole sequences fill the gaps before groups.

Shape letters: G groups, E sum of their degrees, R ranks, n gaps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.planner.adaptive.degrees import Rectangles
from bytescale.planner.adaptive.fill import into_holes
from bytescale.planner.adaptive.place import SAME, Placement

ORDERS = 24
"""Orders tried at most."""
EFFORT = 600
"""Reservations made in all orders together, some 100 microseconds each; the first order is always tried."""
STEPS_UP = 5
"""A group moves forward by 1 to this many places, in turn."""
LITTLE = 1.01
"""The search ends when the traffic is at most this many times the traffic without growth."""


def reserve(
    blocks: Rectangles,
    lengths: IntArray,
    *,
    num_ranks: int,
    target: float,
    whole_seconds: FloatArray,
    launch_seconds: float = 0.0,
) -> Placement:
    """The placement with the least traffic of those found that end in time.

    If none does, groups are placed widest first, each as early as it fits.

    Args:
        blocks: the groups, on equal ranks.
        lengths: ``[G]`` tokens of each.
        num_ranks: R.
        target: seconds; the time by which all should end.
        whole_seconds: ``[n]`` time of each other sequence, descending. A placement is in time only if these fit as
            well: after the shared groups or, if that room is too small, also in the gaps before them.
        launch_seconds: g, the fixed time of a micro-batch, which each of these gaps loses.
    """
    order, fewest = list(range(len(lengths))), float((lengths * (blocks.degrees - 1)).sum())
    best, least, effort = None, np.inf, 0
    for turn in range(ORDERS):
        gaps = Gaps(blocks, num_ranks, target)
        late = next((group for group in order if not gaps.reserve(group, target)), None)
        effort += len(gaps.members)
        if late is None:
            extra = [
                int(lengths[group]) * (len(ranks) - int(blocks.degrees[group])) for group, ranks in gaps.members.items()
            ]
            if fewest + sum(extra) < least:
                placed = _with_whole(gaps, whole_seconds, launch_seconds)
                if placed is not None:
                    best, least = placed, fewest + sum(extra)
            if least <= LITTLE * fewest or not any(extra):
                break
            late = list(gaps.members)[int(np.argmax(extra))]  # it would have been late, had it not grown
        if effort > EFFORT:
            break
        at = order.index(late)
        order.insert(max(0, at - 1 - turn % STEPS_UP), order.pop(at))
    if best is not None:
        return best
    gaps = Gaps(blocks, num_ranks, target)
    for group in range(len(lengths)):
        if not gaps.reserve(group, target):
            gaps.reserve(group, np.inf)
    return gaps.placement()


def _with_whole(gaps: Gaps, seconds: FloatArray, launch_seconds: float) -> Placement | None:
    """The placement, with whole sequences in gaps if they would be late otherwise; None if they are late even so."""
    placed = gaps.placement()
    room = gaps.target * len(placed.free_at) - float(placed.free_at.sum())
    if float(seconds.sum()) <= room:
        return placed
    holes, ranks, followers = gaps.holes()
    hole = into_holes(seconds, holes - launch_seconds)
    if float(seconds[hole < 0].sum()) > room:
        return None
    group_at = np.argsort(placed.groups)
    inside = hole >= 0
    before = np.where(inside, group_at[followers[hole]], len(placed.groups))
    return replace(placed, gap_ranks=np.where(inside, ranks[hole], -1), gap_before=before)


class Gaps:
    """The gaps: ranks that are free from the same moment until the same moment, and the group that then takes them."""

    def __init__(self, blocks: Rectangles, num_ranks: int, target: float) -> None:
        self.blocks, self.num_ranks, self.target, self.same = blocks, num_ranks, target, SAME * target
        self.node = 1  # ranks of a node, once gaps are cut at the edges of nodes
        self.members: dict[int, IntArray] = {}  # ranks of each group, in the order of reservation
        self.starts: dict[int, float] = {}
        self.start, self.stop = np.zeros(16), np.zeros(16)  # [n]
        # [n] number of ranks, 0 if unused; the group that follows, -1: none; the node, 0 before gaps are cut.
        self.width, self.follower, self.home = np.zeros((3, 16), dtype=np.int64)
        self.ranks = [np.zeros(0, dtype=np.int64)] * 16
        self.unused = list(range(16))
        self._add(0.0, np.inf, np.arange(num_ranks), -1)

    def reserve(self, group: int, latest: float) -> bool:
        """Reserve the earliest time that ends by ``latest`` seconds. Returns whether there is any."""
        blocks = self.blocks
        degree, seconds = int(blocks.degrees[group]), float(blocks.seconds[group])
        is_narrow = 1 < blocks.node >= degree
        if is_narrow and self.node == 1:
            self._cut_at_nodes(blocks.node)
        if self._take(group, degree, seconds, latest, is_narrow):
            return True
        for start, most in self._chances(latest, is_narrow):
            if most > degree:
                wider, shorter = blocks.grow(group, 0, most, latest - start)
                if self._take(group, wider, shorter, latest, is_narrow, not_before=start):
                    return True
        return False

    def placement(self) -> Placement:
        """All groups in the order of their starts."""
        groups = np.array(sorted(self.members, key=lambda group: self.starts[group]), dtype=np.int64)
        ranks = [self.members[group] for group in groups.tolist()]
        free_at, last = np.zeros(self.num_ranks), np.flatnonzero(np.isinf(self.stop) & (self.width > 0))
        for gap in last.tolist():
            free_at[self.ranks[gap]] = self.start[gap]
        return Placement(
            groups=groups,
            ranks=np.concatenate([np.zeros(0, np.int64), *ranks]),
            degrees=np.array([len(some) for some in ranks], dtype=np.int64),
            free_at=free_at,
            last=np.zeros(self.num_ranks),
        )

    def holes(self) -> tuple[FloatArray, IntArray, IntArray]:
        """Seconds, rank and the group that follows, of each gap of a rank before a group."""
        inner = np.flatnonzero((self.width > 0) & np.isfinite(self.stop))
        seconds = np.repeat((self.stop - self.start)[inner], self.width[inner])
        ranks = np.concatenate([np.zeros(0, np.int64), *(self.ranks[gap] for gap in inner.tolist())])
        return seconds, ranks, np.repeat(self.follower[inner], self.width[inner])

    def _chances(self, latest: float, is_narrow: bool) -> list[tuple[float, int]]:
        """Moments before ``latest``, rising, and how many ranks (of one node, if ``is_narrow``) are free at each."""
        starts, _, free = self._free(0.0, latest, is_narrow)
        most: dict[float, int] = {}
        for start, ranks in zip(starts.tolist(), free.tolist(), strict=True):
            most[start] = max(most.get(start, 0), ranks)
        return sorted(most.items())

    def _free(self, seconds: float, latest: float, is_narrow: bool) -> tuple[FloatArray, IntArray, IntArray]:
        """Moments, nodes, and how many ranks of the node stay free from then on for ``seconds`` that end by ``latest``.

        Unless the group ``is_narrow``, all ranks count as one node, number 0, and the moments rise.
        """
        end_of_time = 2 * max(float(self.start.max()), self.target)
        last = np.minimum(np.minimum(self.stop, latest) - seconds + self.same, end_of_time)  # latest start in each gap
        able = np.flatnonzero((last >= self.start) & (self.width > 0))
        node = self.home[able] if is_narrow else np.zeros(len(able), dtype=np.int64)
        # Times of all nodes in one row, node after node: what started and ended in earlier nodes cancels out.
        starts, lasts = (2 * end_of_time * node + times[able] for times in (self.start, last))
        by_start, by_last = starts.argsort(kind="stable"), lasts.argsort(kind="stable")
        started = self.width[able[by_start]].cumsum()
        ended = np.concatenate(([0], self.width[able[by_last]].cumsum()))
        free = started - ended[lasts[by_last].searchsorted(starts[by_start])]
        return self.start[able[by_start]], node[by_start], free

    def _take(
        self, group: int, degree: int, seconds: float, latest: float, is_narrow: bool, not_before: float = 0.0
    ) -> bool:
        """Reserve the earliest moment. Of the ranks that are free then, take those that became free last."""
        starts, nodes, free = self._free(seconds, latest, is_narrow)
        able = np.flatnonzero((free >= degree) & (starts >= not_before))
        if not len(able):
            return False
        first = able[starts[able].argmin()]
        start, node = float(starts[first]), int(nodes[first])
        end = start + seconds
        is_open = (self.start <= start) & (self.stop + self.same >= end) & (self.width > 0)
        gaps = np.flatnonzero(is_open & (self.home == node) if is_narrow else is_open)
        parts: list[tuple[float, IntArray]] = []
        after: dict[tuple[float, int], list[IntArray]] = {}  # what is left of the gaps behind the group
        missing = degree
        for gap in gaps[np.argsort(-self.start[gaps], kind="stable")].tolist():
            ranks = self.ranks[gap]
            taken = ranks[:missing]
            missing -= len(taken)
            self.ranks[gap], self.width[gap] = ranks[len(taken) :], len(ranks) - len(taken)
            if len(taken) == len(ranks):
                self.unused.append(gap)
            after.setdefault((float(self.stop[gap]), int(self.follower[gap])), []).append(taken)
            parts.append((float(self.start[gap]), taken))
            if not missing:
                break
        for free_at, ranks in parts:
            self._add(free_at, start, ranks, group)
        for (stop, follower), ranks_after in after.items():
            self._add(end, stop, _joined(ranks_after), follower)
        self.members[group], self.starts[group] = _joined([ranks for _, ranks in parts]), start
        return True

    def _add(self, start: float, stop: float, ranks: IntArray, follower: int) -> None:
        """Add a gap, or one for every node."""
        if stop - start <= self.same:
            return
        cuts = np.flatnonzero(np.diff(ranks // self.node)) + 1 if self.node > 1 else ()
        for part in np.split(ranks, cuts) if len(cuts) else [ranks]:
            if not self.unused:
                self._double()
            gap = self.unused.pop()
            self.start[gap], self.stop[gap], self.width[gap], self.follower[gap] = start, stop, len(part), follower
            self.ranks[gap], self.home[gap] = part, part[0] // self.node if self.node > 1 else 0

    def _double(self) -> None:
        count = len(self.ranks)
        for name in ("start", "stop", "width", "follower", "home"):
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros_like(getattr(self, name)))))
        self.ranks += [self.ranks[0]] * count
        self.unused += range(2 * count - 1, count - 1, -1)

    def _cut_at_nodes(self, node: int) -> None:
        """Cut every gap at the edges of nodes, from now on."""
        self.node = node
        for gap in np.flatnonzero(self.width).tolist():
            self.width[gap] = 0
            self._add(float(self.start[gap]), float(self.stop[gap]), self.ranks[gap], int(self.follower[gap]))
            self.unused.append(gap)


def _joined(parts: list[IntArray]) -> IntArray:
    return parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))
