"""Places whole sequences: on ranks that are free first, or in holes."""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.planner.adaptive.effort import MORE_ABLE, ROUND_RATIO
from bytescale.planner.batch import rising


def deal(
    seconds: FloatArray,
    free_at: FloatArray,
    *,
    speeds: FloatArray | None = None,
    lengths: IntArray | None = None,
    capacity: IntArray | None = None,
) -> tuple[IntArray, FloatArray]:
    """``[n]`` rank of each sequence, longest first on the ranks that are free first; ``[R]`` when ranks are free then.

    A round consists of sequences whose times are within ``ROUND_RATIO`` of each other. Its total time is poured over
    the ranks like water. Each rank gets the whole number of sequences that fits under the surface; the remaining ones
    go to the ranks with the most room for one more. The longest go to the ranks that end furthest below the surface.

    Args:
        seconds: ``[n]`` time of each sequence at speed 1, descending.
        free_at: ``[R]`` when each rank is free.
        speeds: ``[R]``; None: all 1.
        lengths: ``[n]`` tokens of a rank's capacity that each takes, falling; needed with ``capacity``.
        capacity: ``[R]`` tokens of a micro-batch, when some ranks cannot hold some of the sequences.
    """
    ranks = np.empty(len(seconds), dtype=np.int64)
    if len(seconds) == 0:
        return ranks, free_at
    speeds = np.ones(len(free_at)) if speeds is None else speeds
    ends, falling = free_at.copy(), -seconds
    # Ranks that are above the surface of all the time together get no sequence.
    able = np.flatnonzero(free_at <= _surface(float(seconds.sum()), free_at, speeds))
    heights, widths = free_at[able], speeds[able]
    start = 0
    while start < len(seconds):
        stop = int(falling.searchsorted(falling[start] * ROUND_RATIO, side="right"))
        if lengths is not None and capacity is not None:
            able = np.flatnonzero(capacity >= lengths[start])
            heights, widths = ends[able], speeds[able]
            # The round ends where sequences begin that many more ranks hold.
            more = math.ceil(MORE_ABLE * len(able))
            if more < len(capacity):
                held = int(np.partition(capacity, len(capacity) - more)[len(capacity) - more])
                stop = min(stop, max(start + 1, int((-lengths).searchsorted(-held))))
        poured = seconds[start:stop]
        places = _pour(poured, heights, widths)
        heights = heights + np.bincount(places, weights=poured, minlength=len(able)) / widths
        ranks[start:stop], ends[able] = able[places], heights
        start = stop
    return ranks, ends


def _pour(seconds: FloatArray, heights: FloatArray, speeds: FloatArray) -> IntArray:
    """The rank (place in ``heights`` ``[n]``) of each sequence of ``seconds`` ``[m]``. All take about equally long."""
    volume = float(seconds.sum())
    item = volume / len(seconds)
    room = np.maximum(_surface(volume, heights, speeds) - heights, 0.0) * (speeds / item)  # in sequences
    shares = room.astype(np.int64)
    # Ranks with the most room for one more come first, those without any last. Keys of 16 bits are sorted by radix.
    by_room = np.argsort(((1.0 - (room - shares)) * 0xFFFE + (room == 0)).astype(np.uint16), kind="stable")
    odd = len(seconds) - int(shares.sum())
    shares[by_room[:odd]] += 1
    lowest_first = np.concatenate((by_room[odd:], by_room[:odd]))  # ranks with an odd one end above the surface
    shares = shares[lowest_first]
    places = np.repeat(lowest_first, shares)
    # Each turn gives every rank one sequence, so that no rank gets all the long ones.
    turns = np.arange(len(seconds)) - np.repeat(np.cumsum(shares) - shares, shares)
    return places[rising(turns)]


def _surface(volume: float, heights: FloatArray, speeds: FloatArray) -> float:
    """When all ranks end that take a share of ``volume`` seconds of work: those free before, at ``heights``."""
    weights = heights * speeds
    while True:
        surface = (volume + float(weights.sum())) / float(speeds.sum())
        below = heights < surface
        if below.all():
            return surface
        heights, weights, speeds = heights[below], weights[below], speeds[below]


def into_holes(seconds: FloatArray, holes: FloatArray, *, one_each: bool = False) -> IntArray:
    """The hole of each sequence ``[n]``, or -1. Holes, largest first, take the longest sequences that fit.

    Args:
        seconds: ``[n]`` time of each sequence, descending.
        holes: ``[H]`` time of each hole.
        one_each: whether a hole takes one sequence at most.
    """
    taken = np.full(len(seconds), -1)
    rising_seconds, numbers = seconds[::-1].tolist(), list(range(len(seconds) - 1, -1, -1))
    for hole in np.argsort(-holes, kind="stable").tolist():
        room = float(holes[hole])
        while place := bisect_right(rising_seconds, room):
            room = 0.0 if one_each else room - rising_seconds[place - 1]
            del rising_seconds[place - 1]
            taken[numbers.pop(place - 1)] = hole
    return taken
