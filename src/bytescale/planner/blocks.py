"""Placing the shared groups: blocks of consecutive ranks on which nobody waits.

Each shared group is a rectangle, D ranks wide and ``seconds`` high. They are placed widest first. A *plateau* is a run
of consecutive ranks that become free at the same moment; a rectangle goes to the lowest plateau that is wide enough,
and cuts it in two::

    free at                     +-------+            plateau of 5 ranks free at 0, rectangle of 3:
       ^          ->            |   3   |            a plateau of 3 ranks free at its end,
       +---------------+        +-------+-----+      and one of 2 ranks free at 0
       |      5        |        |   3   |  2  |

All members of a group so are free at the same moment, by construction. What a plateau is too narrow for, narrower
groups and, in the end, whole sequences fill.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def place_blocks(degrees: IntArray, seconds: FloatArray, num_ranks: int) -> tuple[IntArray, FloatArray]:
    """First rank of each rectangle ``[G]``, and when each rank is free after all of them ``[R]``.

    Args:
        degrees: ``[G]`` widths, in descending order, each at most ``num_ranks``.
        seconds: ``[G]`` heights.
        num_ranks: R.
    """
    usable = [(0.0, 0, num_ranks)]  # a heap of plateaus at least as wide as the current degree: (free at, first, width)
    narrow: list[tuple[int, float, int]] = []  # a heap of the others: (-width, free at, first)
    first = np.empty(len(degrees), dtype=np.int64)
    for group, (degree, height) in enumerate(zip(degrees.tolist(), seconds.tolist(), strict=True)):
        while narrow and -narrow[0][0] >= degree:
            width, time, start = heapq.heappop(narrow)
            heapq.heappush(usable, (time, start, -width))
        time, start, width = heapq.heappop(usable)
        first[group] = start
        heapq.heappush(usable, (time + height, start, degree))
        if width - degree >= degree:
            heapq.heappush(usable, (time, start + degree, width - degree))
        elif width > degree:
            heapq.heappush(narrow, (degree - width, time, start + degree))
    plateaus = [(start, time) for time, start, _ in usable] + [(start, time) for _, time, start in narrow]
    plateaus.sort()
    starts = np.array([start for start, _ in plateaus] + [num_ranks], dtype=np.int64)
    return first, np.repeat(np.array([time for _, time in plateaus]), np.diff(starts))
