"""Steps 3 and 4 of the planner of rounds: how long each round takes, and where the short sequences go.

Shape letters: K rounds, R ranks; n short sequences, longest first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray

HALVINGS = 20


def levels(ends: FloatArray, room: FloatArray, speeds: FloatArray, *, work: float, least: float) -> FloatArray:
    """``[K]`` seconds of each round, so that all rounds together have time for the short sequences.

    A round is as long as all its ranks can be kept busy. All rounds are shortened by equally many seconds, but none
    below its longest group or ``least``, which it takes anyway; if the sequences need more, all rounds are longer.

    Args:
        ends: ``[K, R]`` seconds after which each rank has ended its slice.
        room: ``[K, R]`` seconds that it can fill with short sequences.
        speeds: ``[R]`` relative to the mean.
        work: seconds of all short sequences on a rank of mean speed.
        least: of every round in seconds: that of the gathers.
    """
    full, last = (ends + room).min(axis=1), ends.max(axis=1)
    last = np.maximum(last, np.minimum(full, least))

    def at(shorter: float) -> tuple[FloatArray, float]:
        seconds = np.maximum(full - shorter, last)
        return seconds, float((np.clip(seconds[:, None] - ends, 0, room) * speeds).sum())

    low, high = -float((ends + room).max()), float(full.max())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle)[1] >= work else (low, middle)
    return at(low)[0]


def fill(lengths: IntArray, work: FloatArray, gaps: FloatArray, room: IntArray) -> IntArray | None:
    """The bin (a rank in a round) of each sequence ``[n]``, as ``round R + rank``. None if there is no room for one.

    1. A sequence goes to the bin with the smallest gap that it fits into: few gaps are left, and small ones. The round
       with most to fill is left out.
    2. What fits nowhere, mostly the shortest, levels out the ranks of that round: the largest gap with room is next.
       When they have no room, all rounds are taken together.

    Args:
        lengths: ``[n]`` tokens, falling.
        work: ``[n]`` seconds of each.
        gaps: ``[K, R]`` seconds that each bin is to be filled with.
        room: ``[K, R]`` tokens that it may hold.
    """
    last, num_ranks = int(gaps.sum(axis=1).argmax()), gaps.shape[1]
    left, bins, rate = room.ravel().tolist(), [-1] * len(lengths), float(work.sum() / max(lengths.sum(), 1))
    needs = np.maximum(work, rate * lengths)  # seconds of a gap, of which a token of room is ``rate``
    least = float(needs.min(initial=np.inf))
    fits = np.minimum(gaps, rate * room)
    fits[last] = 0
    open_gaps = sorted((gap, number) for number, gap in enumerate(fits.ravel().tolist()) if gap >= least)
    unfilled, rest = gaps.ravel().tolist(), list[tuple[int, int, float]]()
    items = enumerate(zip(lengths.tolist(), work.tolist(), needs.tolist(), strict=True))
    for place, (length, seconds, need) in items:
        at = bisect_left(open_gaps, (need, -1))
        if at == len(open_gaps):
            rest.append((place, length, seconds))
            continue
        bins[place] = number = open_gaps.pop(at)[1]
        left[number] -= length
        unfilled[number] -= seconds
        gap = min(unfilled[number], rate * left[number])
        if gap >= least:
            insort(open_gaps, (gap, number))
    # A bin without room for a sequence waits until the sequences are short enough. ``others`` are asked at last.
    ready = [(-gap, last * num_ranks + rank) for rank, gap in enumerate(gaps[last].tolist())]
    others = [number for number in range(gaps.size) if number // num_ranks != last]
    heapq.heapify(ready)
    waiting = list[tuple[int, float, int]]()
    for place, length, seconds in rest:
        while ready and left[ready[0][1]] < length:
            gap, number = heapq.heappop(ready)
            heapq.heappush(waiting, (-left[number], gap, number))
        if not ready and not (waiting and -waiting[0][0] >= length):
            waiting += [(-left[number], -unfilled[number], number) for number in others]
            heapq.heapify(waiting)
            others = []
        while waiting and -waiting[0][0] >= length:
            _, gap, number = heapq.heappop(waiting)
            heapq.heappush(ready, (gap, number))
        if not ready:
            return None
        gap, bins[place] = ready[0]
        heapq.heapreplace(ready, (gap + seconds, bins[place]))
        left[bins[place]] -= length
    return np.array(bins, dtype=np.int64)
