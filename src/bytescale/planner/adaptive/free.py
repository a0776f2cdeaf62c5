"""Free rank-time: which consecutive ranks are free from when until when. A group takes some of it in one of two ways.

It is *stacked* on a free slot, a gap without an end, all of whose ranks become free at the same moment::

    free at                     +-------+            slot of 5 ranks free at 0, group of 3:
       ^          ->            |   3   |            a slot of 3 ranks free at its end,
       +---------------+        +-------+-----+      and one of 2 ranks free at 0
       |      5        |        |   3   |  2  |

So no member of a group waits for another. Among ranks that differ, and in pipelines, all groups are stacked. Or it is
*reserved* (backfilling): it takes ranks of several gaps, which need not be neighbours, at the first moment from which
on enough of them stay free for the whole time of the group::

    rank 3  |aaaaaaaaaaaa|dddddd|        Widest first: a, then d on two of a's ranks and on rank 5. The gap before d is
    rank 4  |aaaaaaaaaaaa|dddddd|        1 second of rank 5. Narrow groups, and then whole sequences, fill such gaps.
    rank 5  |bbbbbbb|eeee|dddddd|

A group that would end late *grows*: it takes just enough more ranks to end in time. With a ``whole_slot`` above 0, a
stacked group takes its whole slot if that adds a smaller share than ``whole_slot``: too few groups may be narrow enough
for the rest. A group that fits into a node stays in one, unless communication is free.

In a pipeline (``evaluate`` has its bubbles) a group goes to the highest slot on which it still ends in time: long
groups then share ranks, and only these ranks have long bubbles.

Shape letters: G groups; E sum of their degrees; R ranks; n gaps before groups.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.plan.plan import concatenated_ranges, offsets_of, segment_sums
from bytescale.planner.adaptive.degrees import Rectangles

Gap = tuple[float, int, int, float, float]
"""Seconds at which it is free; first rank; number of ranks; seconds until which it is free; seconds of the group before
it (0: there is none)."""

SAME = 1e-9
"""Times that differ by less than this share of the target count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Groups in the order in which ranks run them."""

    groups: IntArray  # [G]
    ranks: IntArray  # [E] members, group by group
    degrees: IntArray  # [G]
    free_at: FloatArray  # [R] seconds; when each rank has finished all of them
    last: FloatArray  # [R] seconds of the last of them on each rank; 0 where there is none


class FreeTime:
    """The gaps of R ranks, by the moments at which they are free, and the groups that have taken the rest."""

    def __init__(self, blocks: Rectangles, num_ranks: int, target: float, num_stages: int = 1) -> None:
        self.blocks, self.num_ranks, self.target, self.num_stages = blocks, num_ranks, target, num_stages
        self.same, self.node, self.is_late = SAME * target, 1, False
        self.looks = 0  # at gaps, for reservations
        self.degrees, self.seconds = blocks.degrees.tolist(), blocks.seconds.tolist()
        self.gaps: list[Gap] = [(0.0, 0, num_ranks, np.inf, 0.0)]
        self.strips: list[tuple[int, Gap]] = []  # a heap, widest first: slots too narrow for the last stacked group
        # Group, start and end, seconds, and runs of ranks (first, number), in the order in which they took their time.
        self.taken: list[tuple[int, float, float, float, list[tuple[int, int]]]] = []

    def stack(self, group: int, whole_slot: float = 0.0) -> None:
        """Take the lowest slot (in a pipeline the highest) on which the group ends in time, or ends first."""
        fewest, seconds, latest, gaps = self.degrees[group], self.seconds[group], self.target + self.same, self.gaps
        if fewest <= self.blocks.node:
            self._cut_for(fewest)
        while self.strips and -self.strips[0][0] >= fewest:
            insort(gaps, heapq.heappop(self.strips)[1])
        degree, at = fewest, None
        if self.num_stages > 1:
            in_time = reversed(range(bisect_right(gaps, (latest - seconds,))))
            able = (at for at in in_time if gaps[at][2] >= degree and self._end(gaps[at], seconds) <= latest)
            at = next(able, None)
        if at is None:
            at = 0 if gaps[0][2] >= degree else next(at for at, gap in enumerate(gaps) if gap[2] >= degree)
        end = self._end(gaps[at], seconds)
        if end > latest:
            at, degree, seconds = self._grown(group, degree)
            end = self._end(gaps[at], seconds)
            self.is_late |= end > latest
        start, first, width, stop, last = gaps[at]
        if whole_slot and width > degree:
            speed = self.blocks.speed
            strip, whole = (speed[first + width] - speed[begin] for begin in (first + degree, first))
            if strip <= whole_slot * whole:
                degree, seconds = self.blocks.grow(group, first, width, None)
                end = self._end(gaps[at], seconds)
        # What ``take`` would do, in half the time: a slot is one gap, without an end.
        left = (start, first + degree, width - degree, stop, last)
        if width - degree >= fewest:
            gaps[at] = left
        else:
            del gaps[at]
            if width > degree:
                heapq.heappush(self.strips, (degree - width, left))
        insort(gaps, (end, first, degree, stop, seconds))
        self.taken.append((group, start, end, seconds, [(first, degree)]))

    def reserve(self, group: int, latest: float) -> bool:
        """Take the first moment at which the group ends by ``latest`` seconds. Returns whether there is any."""
        degree, seconds = self.degrees[group], self.seconds[group]
        is_narrow = self._cut_for(degree)
        if self._take_first(group, degree, seconds, latest, is_narrow):
            return True
        most: dict[float, int] = {}
        for start, _, free in self._moments(0.0, latest, is_narrow):
            most[start] = max(most.get(start, 0), free)
        for start, free in most.items():
            if free > degree:
                wider, shorter = self.blocks.grow(group, 0, free, latest - start)
                if self._take_first(group, wider, shorter, latest, is_narrow, not_before=start):
                    return True
        return False

    def unite(self) -> None:
        """Count strips among the gaps again."""
        self.gaps += [gap for _, gap in self.strips]
        self.gaps.sort()
        self.strips.clear()

    def take(self, group: int, start: float, end: float, seconds: float, parts: list[tuple[int, int]]) -> None:
        """Take, from ``start`` to ``end``, so many ranks of each gap (its place, which fall)."""
        gaps, left, runs = self.gaps, list[Gap](), list[tuple[int, int]]()
        for at, count in parts:
            free_at, first, width, stop, last = gaps[at]
            if width > count:
                gaps[at] = (free_at, first + count, width - count, stop, last)
            else:
                del gaps[at]
            runs.append((first, count))
            if start - free_at > self.same:
                left.append((free_at, first, count, start, last))
            if stop - end > self.same:
                left.append((end, first, count, stop, seconds))
        for gap in left:
            insort(gaps, gap)
        self.taken.append((group, start, end, seconds, sorted(runs)))

    def placement(self) -> Placement:
        """All groups in the order of their starts."""
        in_order = sorted(self.taken, key=lambda taken: taken[1])
        groups, _, ends, seconds, runs = zip(*in_order, strict=True) if in_order else ([],) * 5
        first, counts = np.array([run for some in runs for run in some], dtype=np.int64).reshape(-1, 2).T
        degrees = segment_sums(counts, offsets_of(len(some) for some in runs))
        ranks = concatenated_ranges(first, first + counts)
        free_at, last = np.zeros((2, self.num_ranks))
        # Later groups come after earlier ones: of several values for a rank, the assignment keeps the last.
        free_at[ranks], last[ranks] = np.repeat(ends, degrees), np.repeat(seconds, degrees)
        return Placement(
            groups=np.array(groups, dtype=np.int64), ranks=ranks, degrees=degrees, free_at=free_at, last=last
        )

    def holes(self) -> tuple[IntArray, FloatArray, FloatArray]:
        """``[n]`` rank, start and seconds, of each gap of a rank before a group."""
        inner = np.array([gap[:4] for gap in self.gaps if gap[3] < np.inf]).reshape(-1, 4)
        widths = inner[:, 2].astype(np.int64)
        first = inner[:, 1].astype(np.int64)
        ranks = concatenated_ranges(first, first + widths)
        return ranks, np.repeat(inner[:, 0], widths), np.repeat(inner[:, 3] - inner[:, 0], widths)

    def _end(self, gap: Gap, seconds: float) -> float:
        """When a group of so many ``seconds`` ends in the gap, with the bubbles that it adds."""
        rise = (self.num_stages - 1) * (seconds - gap[4])
        return gap[0] + seconds + rise if rise > 0 else gap[0] + seconds

    def _grown(self, group: int, degree: int) -> tuple[int, int, float]:
        """The lowest slot on which the group can end in time, or else ends first; its ranks there, and its seconds.

        After a group that was late, it is the lowest slot that holds the group.
        """
        best, earliest, target, more = (0, 0, np.inf), np.inf, self.target, self.num_stages - 1
        # On equal ranks without bubbles, only a wider slot can make up for being free later.
        wider_alone, widest = not more and self.seconds[group] < np.inf, degree - 1
        for at, gap in enumerate(self.gaps):
            time, left, width, _, last = gap
            if width < degree or (wider_alone and width <= widest):
                continue
            widest = width
            # The longest group that ends in time: its seconds, and its bubbles if it is longer than the last one.
            room = min(target - time, max(last, (target - time + more * last) / (more + 1)))
            chosen, seconds = self.blocks.grow(group, left, width, room)
            end = self._end(gap, seconds)
            if end < earliest:
                best, earliest = (at, chosen, seconds), end
            if earliest <= target + self.same or time > earliest or (chosen and self.is_late):
                break
        return best

    def _moments(self, seconds: float, latest: float, is_narrow: bool) -> Iterator[tuple[float, int, int]]:
        """Moments, rising; a node; and its ranks that stay free from then on for ``seconds`` that end by ``latest``.

        Unless the group ``is_narrow``, all ranks count as one node, number 0.
        """
        free, closing, node = defaultdict[int, int](int), list[tuple[float, int, int]](), self.node
        last_start = latest - seconds + self.same
        for start, first, width, stop, _ in self.gaps:
            self.looks += 1
            if start > last_start:
                return
            last = stop - seconds + self.same
            if last < start:
                continue
            while closing and closing[0][0] < start:
                _, home, closed = heapq.heappop(closing)
                free[home] -= closed
            home = first // node if is_narrow else 0
            free[home] += width
            if last < last_start:
                heapq.heappush(closing, (last, home, width))
            yield start, home, free[home]

    def _take_first(
        self, group: int, degree: int, seconds: float, latest: float, is_narrow: bool, not_before: float = 0.0
    ) -> bool:
        """Take the first moment. Of the ranks that are free then, take those that became free last."""
        moments = self._moments(seconds, latest, is_narrow)
        found = next((moment for moment in moments if moment[2] >= degree and moment[0] >= not_before), None)
        if found is None:
            return False
        start, home, _ = found
        parts, missing, end = list[tuple[int, int]](), degree, start + seconds
        for at in range(bisect_right(self.gaps, (start, np.inf)) - 1, -1, -1):
            _, first, width, stop, _ = self.gaps[at]
            if stop + self.same >= end and (not is_narrow or first // self.node == home):
                parts.append((at, min(width, missing)))
                missing -= min(width, missing)
                if not missing:
                    break
        self.take(group, start, end, seconds, parts)
        return True

    def _cut_for(self, degree: int) -> bool:
        """Whether a group of ``degree`` ranks has to stay in a node. If so, all gaps are cut at the edges of nodes."""
        node = self.blocks.node
        if node == 1 or degree > node:
            return False
        if self.node == 1:
            self.node = node
            self.unite()
            self.gaps[:] = sorted(
                (start, left, right - left, *rest)
                for start, first, width, *rest in self.gaps
                for left, right in pairwise(
                    [first, *range((first // node + 1) * node, first + width, node), first + width]
                )
            )
        return True
