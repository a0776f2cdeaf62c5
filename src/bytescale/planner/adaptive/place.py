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
cool-down. A later one counts p - 1 times more for what it is longer than the one before it, and a shorter one adds
nothing (``evaluate``). So in a pipeline a rectangle goes to the highest plateau on which it still ends in time: long
rectangles then share ranks, and only these ranks have long bubbles.

Shape letters: G groups; E sum of their degrees; R ranks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.planner.adaptive.degrees import Rectangles
from bytescale.planner.draft import consecutive

Plateau = tuple[float, int, int, float]
"""Seconds at which it is free, first rank, number of ranks, seconds of the last group on them (0: there is none)."""

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
    usable, narrow = [(0.0, 0, num_ranks, 0.0)], list[tuple[int, float, int, float]]()
    latest, is_late, node = target * (1 + SAME), False, blocks.node
    first, taken, heights, ends, speed = [], [], [], [], blocks.speed
    for group, (degree, height) in enumerate(zip(blocks.degrees.tolist(), blocks.seconds.tolist(), strict=True)):
        if 1 < node >= degree:
            usable, narrow = _split_at_nodes(usable, narrow, node, degree)
            node = 1
        while narrow and -narrow[0][0] >= degree:
            width, time, left, last = heapq.heappop(narrow)
            insort(usable, (time, left, -width, last))
        at = 0 if num_stages == 1 else _highest(usable, height, latest, num_stages)
        time, left, width, last = usable[at]
        chosen, end = degree, _end(usable[at], height, num_stages)
        if end > latest:
            at, chosen, height = _grown(blocks, group, usable, target, num_stages, try_all=not is_late)
            time, left, width, last = usable[at]
            end = _end(usable[at], height, num_stages)
            is_late |= end > latest
        if snap and width > chosen:
            strip, whole = (speed[left + width] - speed[start] for start in (left + chosen, left))
            if strip <= snap * whole:
                chosen, height = blocks.grow(group, left, width, None)
                end = _end(usable[at], height, num_stages)
        first.append(left)
        taken.append(chosen)
        heights.append(height)
        ends.append(end)
        if width - chosen >= degree:
            usable[at] = (time, left + chosen, width - chosen, last)
        else:
            del usable[at]
            if width > chosen:
                heapq.heappush(narrow, (chosen - width, time, left + chosen, last))
        insort(usable, (end, left, chosen, height))
    degrees = np.array(taken, dtype=np.int64)
    ranks = consecutive(np.array(first, dtype=np.int64), degrees)
    free_at, last_seconds = np.zeros((2, num_ranks))
    # Later rectangles are on top of earlier ones: of several values for a rank, the assignment keeps the last.
    free_at[ranks], last_seconds[ranks] = np.repeat(ends, degrees), np.repeat(heights, degrees)
    return Placement(groups=np.arange(len(first)), ranks=ranks, degrees=degrees, free_at=free_at, last=last_seconds)


def _end(plateau: Plateau, height: float, num_stages: int) -> float:
    """Seconds; when a group of ``height`` seconds ends on the plateau, with the bubbles that it adds."""
    time, _, _, last = plateau
    return time + height + (num_stages - 1) * (height - last) if num_stages > 1 and height > last else time + height


def _highest(usable: list[Plateau], height: float, latest: float, num_stages: int) -> int:
    """The highest plateau on which a group of ``height`` seconds ends by ``latest``, or else the lowest plateau."""
    for at in range(bisect_right(usable, (latest - height, 0, 0, 0.0)) - 1, -1, -1):
        if _end(usable[at], height, num_stages) <= latest:
            return at
    return 0


def _grown(
    blocks: Rectangles, group: int, usable: list[Plateau], target: float, num_stages: int, try_all: bool
) -> tuple[int, int, float]:
    """The lowest plateau on which the group can end in time, or else ends first; its ranks there, and its seconds.

    With ``try_all`` false, it is the lowest plateau that holds the group.
    """
    best, earliest = (0, 0, np.inf), np.inf
    for at, plateau in enumerate(usable):
        time, left, width, last = plateau
        # The longest group that ends in time: its seconds, and its bubbles if it is longer than the last one.
        room = min(target - time, max(last, (target - time + (num_stages - 1) * last) / num_stages))
        chosen, height = blocks.grow(group, left, width, room)
        end = _end(plateau, height, num_stages)
        if end < earliest:
            best, earliest = (at, chosen, height), end
        if earliest <= target * (1 + SAME) or time > earliest or (chosen and not try_all):
            break
    return best


def _split_at_nodes(
    usable: list[Plateau], narrow: list[tuple[int, float, int, float]], node: int, degree: int
) -> tuple[list[Plateau], list[tuple[int, float, int, float]]]:
    """Cut all plateaus at node boundaries, so that every group that fits into a node stays inside one."""
    wide, rest = [], []
    for time, start, width, last in [*usable, *((time, start, -width, last) for width, time, start, last in narrow)]:
        edges = [start, *range((start // node + 1) * node, start + width, node), start + width]
        for left, right in pairwise(edges):
            if right - left >= degree:
                wide.append((time, left, right - left, last))
            else:
                rest.append((left - right, time, left, last))
    heapq.heapify(rest)
    return sorted(wide), rest
