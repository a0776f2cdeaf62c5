"""Places the shared groups on blocks of consecutive ranks, so that no member waits for another.

Each shared group is a rectangle: its width is its number D of ranks, and its height is its time. Rectangles are placed
widest first. A *plateau* is a run of consecutive ranks that become free at the same moment. A rectangle goes to the
lowest plateau that is wide enough, and cuts it in two::

    free at                     +-------+            plateau of 5 ranks free at 0, rectangle of 3:
       ^          ->            |   3   |            a plateau of 3 ranks free at its end,
       +---------------+        +-------+-----+      and one of 2 ranks free at 0
       |      5        |        |   3   |  2  |

So all members of a group are free at the same moment, by construction. Plateaus that are too narrow for a group are
filled by narrower groups and finally by whole sequences. A rectangle *grows* (more ranks, less time) in two cases:

* it would end after the target, and a wider rectangle on the same plateau would not;
* it would leave a strip that is narrow compared with the plateau (at most ``snap`` of it), and the narrower groups have
  too little work to fill such strips (``HALL``). The rectangle then takes the whole plateau.

In a pipeline of p stages the first rectangle on a rank counts p times: p - 1 times for the bubbles of its warm-up and
cool-down. Shorter rectangles after it add nothing to these bubbles (``evaluate``). So in a pipeline a rectangle goes to
the highest plateau on which it still ends in time: long rectangles then share ranks, and only these ranks have long
bubbles.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.cost import CostModel
from bytescale.planner.adaptive.placement import Placement
from bytescale.planner.adaptive.target import block_seconds, is_ideal

FloatArray = NDArray[np.float64]

HALL = 0.25
"""Strips may hold as much time as this share of the work that is narrow enough for them (0.1 to 1 were tried)."""


def place_blocks(
    lengths: IntArray,
    degrees: IntArray,
    *,
    cost: CostModel,
    num_ranks: int,
    target: float,
    snap: float,
    narrow_work: FloatArray | None = None,
    num_stages: int = 1,
    limit: float = np.inf,
) -> Placement:
    """Place one rectangle per sequence. Returns those placed, which are not all if one ends after ``limit``.

    Args:
        lengths: ``[G]`` tokens.
        degrees: ``[G]`` fewest ranks of each, descending.
        cost: tells the time of a group.
        num_ranks: R.
        target: seconds; the time by which all should end.
        snap: see above; with 0 a rectangle never takes a whole plateau to avoid a strip.
        narrow_work: ``[max degree + 1]`` rank-seconds of all sequences of at most this degree; needed if ``snap`` > 0.
        num_stages: pipeline stages.
        limit: seconds; the first rectangle that ends after it is the last one placed.
    """
    seconds_on = timer(cost)
    # Plateaus at least as wide as the current degree, (free at, first, width): a heap, in a pipeline a sorted list.
    usable = [(0.0, 0, num_ranks)]
    push = heapq.heappush if num_stages == 1 else insort
    narrow: list[tuple[int, float, int]] = []  # a heap of the others: (-width, free at, first)
    split_at_nodes = not is_ideal(cost)
    narrow_work = np.zeros(1) if narrow_work is None else narrow_work
    locked = np.zeros(len(narrow_work))  # rank-seconds above plateaus of at most this width
    first: list[int] = []
    taken: list[int] = []
    ends: list[float] = []
    works, heights = cost.work_seconds(lengths).tolist(), block_seconds(cost, lengths, degrees).tolist()
    for length, chosen, work, height in zip(lengths.tolist(), degrees.tolist(), works, heights, strict=True):
        degree = chosen
        if split_at_nodes and degree <= cost.ranks_per_node:
            usable, narrow = _split_at_nodes(usable, narrow, cost.ranks_per_node, degree)
            split_at_nodes = False
        while narrow and -narrow[0][0] >= degree:
            width, time, left = heapq.heappop(narrow)
            push(usable, (time, left, -width))
        place = 0 if num_stages == 1 else max(bisect_right(usable, (target - height, num_ranks, 0)) - 1, 0)
        time, left, width = usable[place]
        times = num_stages if time == 0 else 1
        if time + times * height > target:
            chosen, height = grow(seconds_on, work, length, degree, width, (target - time) / times)
        strip = width - chosen
        if snap > 0 and 0 < strip < degree:
            area = strip * (target - time)
            too_little_work = locked[strip] + area > HALL * narrow_work[strip]
            if strip <= snap * width and too_little_work:
                chosen, height, strip = width, seconds_on(work, length, width), 0
            else:
                locked[strip : degree + 1] += area
        first.append(left)
        taken.append(chosen)
        if strip >= degree:
            usable[place] = (time, left + chosen, strip)
        else:
            if num_stages == 1:
                heapq.heappop(usable)
            else:
                del usable[place]
            if strip > 0:
                heapq.heappush(narrow, (-strip, time, left + chosen))
        ends.append(time + times * height)
        if ends[-1] > limit:
            break
        push(usable, (ends[-1], left, chosen))
    placed = Placement.side_by_side(
        np.array(first, dtype=np.int64), np.array(taken, dtype=np.int64), np.zeros(num_ranks)
    )
    # Later rectangles are on top of earlier ones: of several values for a rank, the assignment keeps the last.
    placed.free_at[placed.ranks] = np.repeat(ends, placed.degrees)
    return placed


def timer(cost: CostModel) -> Callable[[float, int, int], float]:
    """``cost.group_seconds`` for one sequence, in plain floats: some 20 times as fast for a single value."""
    launch = cost.micro_batch_seconds
    if is_ideal(cost):
        return lambda work, length, degree: work / degree + launch
    latency, message, squares = cost.ring_step_seconds, cost.ring_message_seconds, cost.attention_seconds_per_pair
    intra = cost.ring_bytes_per_token / cost.intra_node_bytes_per_second
    inter = cost.ring_bytes_per_token / cost.inter_node_bytes_per_second
    node = cost.ranks_per_node

    def seconds_on(work: float, length: int, degree: int) -> float:
        transfer = (inter if degree > node else intra) * length / degree + latency
        block = squares * length * length / (degree * degree)
        return work / degree + (degree - 1) * (max(transfer - block, 0.0) + message) + launch

    return seconds_on


def grow(
    seconds_on: Callable[[float, int, int], float], work: float, length: int, degree: int, width: int, room: float
) -> tuple[int, float]:
    """The fewest ranks, at most ``width``, that end within ``room`` seconds, and the time there.

    If none do, the faster of ``degree`` and ``width`` ranks.
    """
    if room > 0:
        asked, beside_compute = degree, 0.0
        for _ in range(4):
            if beside_compute >= room:
                break
            asked = max(asked + 1, -int(-work // (room - beside_compute)))
            if asked > width:
                break
            height = seconds_on(work, length, asked)
            if height <= room * (1 + 1e-9):
                return asked, height
            beside_compute = height - work / asked
    fewest, all_of_it = seconds_on(work, length, degree), seconds_on(work, length, width)
    return (degree, fewest) if fewest <= all_of_it else (width, all_of_it)


def _split_at_nodes(
    usable: list[tuple[float, int, int]], narrow: list[tuple[int, float, int]], node: int, degree: int
) -> tuple[list[tuple[float, int, int]], list[tuple[int, float, int]]]:
    """Cut all plateaus at node boundaries, so that every group that fits into a node stays inside one."""
    plateaus = [*usable, *((time, start, -width) for width, time, start in narrow)]
    wide, rest = [], []
    for time, start, width in plateaus:
        edges = [start, *range((start // node + 1) * node, start + width, node), start + width]
        for left, right in pairwise(edges):
            if right - left >= degree:
                wide.append((time, left, right - left))
            else:
                rest.append((left - right, time, left))
    heapq.heapify(rest)
    return sorted(wide), rest
