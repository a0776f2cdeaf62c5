"""Shelves: what stands beside a wide group is filled up to the group's end, so that all ranks are free together again.

``blocks`` stacks groups like stairs, and a strip between two steps has to be filled by groups that are as narrow as it.
With few ranks for the longest sequences most steps are a few ranks wide, and too few sequences are as narrow. A shelf
closes the strip at once instead::

    free at       +---------+--+--+
       ^          |         | b|  |        a is the shelf's wide group; b, c, d, e the widest groups, or the longest
       |          |    a    +--+ e|        whole sequences, that fit into what is left beside it, then beside those,
       |          |         | c+--+        until nothing fits; then comes the next shelf, on all ranks
       |          |         |  | d|
                  +---------+--+--+

Every sequence keeps its degree, so there is no more traffic than with the fewest ranks.

The widest that fits may leave a space that nothing wide fits into. With ``pairs``, wide spaces take the sequence that
fills most of them together with another one beside it (117 ranks leave 83 of 200, 113 leave room for 84).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


PAIRS = 0.25
"""Narrower spaces have plenty of sequences to choose from."""


class Shelves(NamedTuple):
    """K sequences on shelves, by their start."""

    items: IntArray  # [K] which of the sequences
    first: IntArray  # [K] first rank
    degrees: IntArray  # [K]
    top: float  # when all ranks are free


def fill_shelves(
    degrees: IntArray, seconds: FloatArray, *, num_ranks: int, narrowest: int, pairs: bool = False
) -> Shelves:
    """Put every sequence of at least ``narrowest`` ranks on a shelf of its own, and narrower ones beside them.

    Args:
        degrees: ``[n]`` ranks of each sequence, 1 for whole ones.
        seconds: ``[n]`` time of each there.
        num_ranks: R.
        narrowest: degree of the last shelf's wide group.
        pairs: whether spaces at least ``PAIRS`` of that wide are filled with two sequences in mind.
    """
    stock = _Stock(degrees, seconds)
    placed: list[tuple[float, int, int]] = []  # (start, first rank, item)
    widths, times = degrees.tolist(), seconds.tolist()
    top = 0.0
    while (item := stock.take(num_ranks, np.inf, at_least=narrowest)) >= 0:
        end = top + times[item]
        placed.append((top, 0, item))
        spaces = [(widths[item], num_ranks - widths[item], top, end)]  # (first rank, width, start, stop)
        while spaces:
            first, width, start, stop = spaces.pop()
            item = -1
            if pairs and width >= PAIRS * narrowest:
                item = stock.take_of_pair(width, stop - start)
            if item < 0:
                item = stock.take(width, stop - start)
            if item >= 0:
                placed.append((start, first, item))
                above = start + times[item]
                spaces.append((first, width, above, stop))
                spaces.append((first + widths[item], width - widths[item], start, above))
        top = end
    placed.sort()
    items = np.array([item for _, _, item in placed], dtype=np.int64)
    return Shelves(
        items=items,
        first=np.array([first for _, first, _ in placed], dtype=np.int64),
        degrees=degrees[items],
        top=top,
    )


class _Stock:
    """Sequences that are not placed yet, by degree, and by time inside."""

    def __init__(self, degrees: IntArray, seconds: FloatArray) -> None:
        widest_first = np.lexsort((seconds, -degrees))
        edges = np.flatnonzero(np.diff(degrees[widest_first])) + 1
        runs = [run for run in np.split(widest_first, edges) if len(run)]
        self._narrowness = [-int(degrees[run[0]]) for run in runs]  # rising
        self._seconds = [seconds[run].tolist() for run in runs]  # rising in each
        self._items = [run.tolist() for run in runs]

    def take(self, width: int, room: float, *, at_least: int = 1) -> int:
        """The widest sequence of at most ``width`` ranks and ``room`` seconds, the longest of these; -1: none."""
        for run in range(bisect_left(self._narrowness, -width), bisect_right(self._narrowness, -at_least)):
            if self._seconds[run][0] <= room:
                return self._pop(run, bisect_right(self._seconds[run], room) - 1)
        return -1

    def take_of_pair(self, width: int, room: float) -> int:
        """One of the two sequences of most rank-seconds that fit beside each other; -1 where none fits."""
        best, chosen = 0.0, (-1, -1)
        for run, place, area in self._fitting(width, room):
            beside = self._fitting(width + self._narrowness[run], room)
            most = area + max((a for other, p, a in beside if (other, p) != (run, place)), default=0.0)
            if most > best * (1 + 1e-9):
                best, chosen = most, (run, place)
        return self._pop(*chosen) if best > 0 else -1

    def _fitting(self, width: int, room: float) -> list[tuple[int, int, float]]:
        """Of each degree the longest sequence that fits: (run, place, rank-seconds)."""
        found = []
        for run in range(bisect_left(self._narrowness, -width), len(self._narrowness)):
            place = bisect_right(self._seconds[run], room) - 1
            if place >= 0:
                found.append((run, place, -self._narrowness[run] * self._seconds[run][place]))
        return found

    def _pop(self, run: int, place: int) -> int:
        self._seconds[run].pop(place)
        item = self._items[run].pop(place)
        if not self._items[run]:
            del self._narrowness[run], self._seconds[run], self._items[run]
        return item
