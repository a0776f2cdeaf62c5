"""Places the shared groups on blocks of consecutive ranks, so that no member waits for another.

Each shared group is a rectangle: its width is its number D of ranks, and its height is its time. Rectangles are placed
widest first. A *plateau* is a run of consecutive ranks that become free at the same moment. A rectangle goes to the
lowest plateau that is wide enough, and cuts it in two::

    free at                     +-------+            plateau of 5 ranks free at 0, rectangle of 3:
       ^          ->            |   3   |            a plateau of 3 ranks free at its end,
       +---------------+        +-------+-----+      and one of 2 ranks free at 0
       |      5        |        |   3   |  2  |

So all members of a group are free at the same moment, by construction. Plateaus that are too narrow for a group are
filled by narrower groups and finally by whole sequences. A rectangle that would end late *grows*: it takes just enough
more ranks of the lowest plateau on which it then ends in time. With a *snap* above 0, a rectangle takes its whole
plateau if that adds a smaller share than ``snap``: too few groups may be narrow enough for the rest.

In a pipeline of p stages the first rectangle on a rank counts p times: p - 1 times for the bubbles of its warm-up and
cool-down. Shorter rectangles after it add nothing to these bubbles (``evaluate``). So in a pipeline a rectangle goes to
the highest plateau on which it still ends in time: long rectangles then share ranks, and only these ranks have long
bubbles.

Shape letters: G groups; E sum of their degrees; R ranks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.planner.adaptive.degrees import Rectangles
from bytescale.planner.draft import consecutive

FloatArray = NDArray[np.float64]
Plateau = tuple[float, int, int]
"""Seconds at which it is free, first rank, number of ranks."""

SAME = 1e-9
"""Times that differ by less than this share of the target count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Groups in the order in which ranks run them."""

    groups: IntArray  # [G]
    ranks: IntArray  # [E] members, group by group
    degrees: IntArray  # [G]
    free_at: FloatArray  # [R] seconds; when each rank has finished all of them
    gap_ranks: IntArray | None = None
    """``[n]`` the rank that runs each whole sequence in a gap before a group; -1: none. None: none does."""
    gap_before: IntArray | None = None  # [n] that group, as a place in ``groups``; G: after all of them


def place(blocks: Rectangles, num_ranks: int, *, target: float, num_stages: int = 1, snap: float = 0.0) -> Placement:
    """Place all groups on R = ``num_ranks`` ranks.

    Args:
        blocks: the groups.
        num_ranks: R.
        target: seconds; the time by which all should end.
        num_stages: pipeline stages.
        snap: share of a plateau's speed.
    """
    # Plateaus at least as wide as the current degree, lowest first; and a heap of the others: (-width, free at, first).
    usable, narrow = [(0.0, 0, num_ranks)], list[tuple[int, float, int]]()
    latest, is_late, node = target * (1 + SAME), False, blocks.node
    first, taken, ends, speed = [], [], [], blocks.speed
    for group, (degree, height) in enumerate(zip(blocks.degrees.tolist(), blocks.seconds.tolist(), strict=True)):
        if 1 < node >= degree:
            usable, narrow = _split_at_nodes(usable, narrow, node, degree)
            node = 1
        while narrow and -narrow[0][0] >= degree:
            width, time, left = heapq.heappop(narrow)
            insort(usable, (time, left, -width))
        at = 0 if num_stages == 1 else max(bisect_right(usable, (target - height, num_ranks, 0)) - 1, 0)
        time, left, width = usable[at]
        chosen, end = degree, time + height * (num_stages if time == 0 else 1)
        if end > latest:
            at, chosen, end = _grown(blocks, group, usable, target, num_stages, try_all=not is_late)
            is_late |= end > latest
            time, left, width = usable[at]
        if snap and width > chosen:
            strip, whole = (speed[left + width] - speed[start] for start in (left + chosen, left))
            if strip <= snap * whole:
                chosen, height = blocks.grow(group, left, width, 0.0)
                end = time + height * (num_stages if time == 0 else 1)
        first.append(left)
        taken.append(chosen)
        ends.append(end)
        if width - chosen >= degree:
            usable[at] = (time, left + chosen, width - chosen)
        else:
            del usable[at]
            if width > chosen:
                heapq.heappush(narrow, (chosen - width, time, left + chosen))
        insort(usable, (end, left, chosen))
    degrees = np.array(taken, dtype=np.int64)
    ranks, free_at = consecutive(np.array(first, dtype=np.int64), degrees), np.zeros(num_ranks)
    # Later rectangles are on top of earlier ones: of several values for a rank, the assignment keeps the last.
    free_at[ranks] = np.repeat(ends, degrees)
    return Placement(groups=np.arange(len(first)), ranks=ranks, degrees=degrees, free_at=free_at)


def _grown(
    blocks: Rectangles, group: int, usable: list[Plateau], target: float, num_stages: int, try_all: bool
) -> tuple[int, int, float]:
    """The lowest plateau on which the group can end in time, or else ends first; its ranks there, and its end.

    With ``try_all`` false, it is the lowest plateau that holds the group.
    """
    best = (0, 0, np.inf)
    for at, (time, left, width) in enumerate(usable):
        times = num_stages if time == 0 else 1
        chosen, height = blocks.grow(group, left, width, (target - time) / times)
        if time + times * height < best[2]:
            best = (at, chosen, time + times * height)
        if best[2] <= target * (1 + SAME) or time > best[2] or (chosen and not try_all):
            break
    return best


def _split_at_nodes(
    usable: list[Plateau], narrow: list[tuple[int, float, int]], node: int, degree: int
) -> tuple[list[Plateau], list[tuple[int, float, int]]]:
    """Cut all plateaus at node boundaries, so that every group that fits into a node stays inside one."""
    wide, rest = [], []
    for time, start, width in [*usable, *((time, start, -width) for width, time, start in narrow)]:
        edges = [start, *range((start // node + 1) * node, start + width, node), start + width]
        for left, right in pairwise(edges):
            if right - left >= degree:
                wide.append((time, left, right - left))
            else:
                rest.append((left - right, time, left))
    heapq.heapify(rest)
    return sorted(wide), rest
