"""Places whole sequences: in holes between shared groups or on ranks after them; then packs them in micro-batches."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.planner.order import rising
from bytescale.planner.packing import best_fit

FloatArray = NDArray[np.float64]

PASS = 20
"""Time of one pass over all ranks, divided by the time of packing a single sequence."""

CHUNK_RATIO = 0.5
"""Sequences are assigned in one chunk if their times differ by less than this factor.

A ratio of 0.8 gives no smaller makespan and takes 2.3 times as long.
"""

NUMBER_BITS = 20
"""Low bits of a key that hold the number of a micro-batch; the bits above hold the room left in it."""


def deal(
    seconds: FloatArray,
    free_at: FloatArray,
    *,
    speeds: FloatArray | None = None,
    lengths: IntArray | None = None,
    capacity: IntArray | None = None,
) -> tuple[IntArray, FloatArray]:
    """Assign sequences, longest first, to the ranks that are free first, in chunks.

    A chunk consists of sequences whose times are within ``CHUNK_RATIO`` of each other. Its total time is poured over
    the ranks like water. Each rank gets the whole number of sequences that fits under the surface; the remaining
    sequences go to the ranks with the most room for one more. Within the chunk, the longest sequences go to the ranks
    that end furthest below the surface and the shortest to those furthest above it. Later chunks, whose sequences are
    shorter, level out the differences.

    Args:
        seconds: ``[n]`` time of each sequence at speed 1, descending.
        free_at: ``[R]`` when each rank is free.
        speeds: ``[R]``; None: all 1.
        lengths: ``[n]`` tokens, needed with ``capacity``.
        capacity: ``[R]`` tokens of a micro-batch, when some ranks cannot hold some of the sequences.

    Returns:
        rank of each sequence ``[n]``, and when each rank is free in the end ``[R]``.
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
        stop = int(falling.searchsorted(falling[start] * CHUNK_RATIO, side="right"))
        if lengths is not None and capacity is not None:
            able = np.flatnonzero(capacity >= lengths[start])
            heights, widths = ends[able], speeds[able]
        chunk = seconds[start:stop]
        places = _pour(chunk, heights, widths)
        heights = heights + np.bincount(places, weights=chunk, minlength=len(able)) / widths
        ranks[start:stop], ends[able] = able[places], heights
        start = stop
    return ranks, ends


def _pour(chunk: FloatArray, heights: FloatArray, speeds: FloatArray) -> IntArray:
    """The rank (place in ``heights`` ``[n]``) of each sequence of ``chunk`` ``[m]``. All take about equally long."""
    volume = float(chunk.sum())
    item = volume / len(chunk)
    room = np.maximum(_surface(volume, heights, speeds) - heights, 0.0) * (speeds / item)  # in sequences
    shares = room.astype(np.int64)
    # Ranks with the most room for one more come first, those without any last. Keys of 16 bits are sorted by radix.
    by_room = np.argsort(((1.0 - (room - shares)) * 0xFFFE + (room == 0)).astype(np.uint16), kind="stable")
    odd = len(chunk) - int(shares.sum())
    shares[by_room[:odd]] += 1
    lowest_first = np.concatenate((by_room[odd:], by_room[:odd]))  # ranks with an odd one end above the surface
    shares = shares[lowest_first]
    places = np.repeat(lowest_first, shares)
    # Each round gives every rank one sequence, so that no rank gets all the long ones.
    rounds = np.arange(len(chunk)) - np.repeat(np.cumsum(shares) - shares, shares)
    return places[rising(rounds)]


def _surface(volume: float, heights: FloatArray, speeds: FloatArray) -> float:
    """The level at which ``volume`` comes to rest when poured over vessels of width ``speeds`` and floors ``heights``.

    Computed for all vessels, then without those whose floors are above the result, until there are none.
    """
    weights = heights * speeds
    while True:
        surface = (volume + float(weights.sum())) / float(speeds.sum())
        below = heights < surface
        if below.all():
            return surface
        heights, weights, speeds = heights[below], weights[below], speeds[below]


def into_holes(seconds: FloatArray, holes: FloatArray) -> IntArray:
    """The hole of each sequence ``[n]``, or -1. Holes, largest first, take the longest sequences that fit.

    Args:
        seconds: ``[n]`` time of each sequence, descending.
        holes: ``[H]`` time of each hole.
    """
    taken = np.full(len(seconds), -1)
    rising_seconds, numbers = seconds[::-1].tolist(), list(range(len(seconds) - 1, -1, -1))
    for hole in np.argsort(-holes, kind="stable").tolist():
        room = float(holes[hole])
        while place := bisect_right(rising_seconds, room):
            room -= rising_seconds.pop(place - 1)
            taken[numbers.pop(place - 1)] = hole
    return taken


def micro_batches(lengths: IntArray, ranks: IntArray, capacity: IntArray) -> IntArray:
    """Index of the micro-batch, on its own rank, of each sequence ``[n]``: best fit, in the given order.

    All ranks pack at once: pass k puts the k-th sequence of every rank into its fullest micro-batch with enough room.
    The few ranks that have by far the most sequences would need passes for themselves, so they pack one by one.

    Args:
        lengths: ``[n]`` tokens, sorted by rank; on each rank, longest first is best.
        ranks: ``[n]`` rising.
        capacity: ``[R]`` tokens of one micro-batch.
    """
    index = np.zeros(len(lengths), dtype=np.int64)
    if len(lengths) == 0:
        return index
    counts = np.bincount(ranks)
    heads = np.cumsum(counts) - counts
    most_first = rising(counts.max() - counts)
    heads, counts, size = heads[most_first], counts[most_first], capacity[most_first]
    alone = int((PASS * np.append(counts, 0) + np.append(0, np.cumsum(counts))).argmin())
    for head, count, room in zip(*(part[:alone].tolist() for part in (heads, counts, size)), strict=True):
        index[head : head + count] = best_fit(lengths[head : head + count], room)
    heads, counts, size = heads[alone:], counts[alone:], size[alone:]
    passes = np.arange(1, counts.max(initial=0) + 1)
    packing = np.searchsorted(-counts, -passes, side="right")  # number of ranks that take part in each pass
    # The key of a micro-batch is the number (room left, index). Of those with enough room, the smallest key is that of
    # the fullest one, and of the oldest of equally full ones. Without enough room, the difference wraps around to a
    # huge number.
    sizes = lengths.astype(np.uint64) << NUMBER_BITS
    empty = size.astype(np.uint64) << NUMBER_BITS
    keys = empty[None].copy()  # [micro-batches opened so far, and one empty; ranks]
    rows = np.arange(len(heads))
    for k, active in enumerate(packing.tolist()):
        items = heads[:active] + k
        fullest = (keys[:, :active] - sizes[items]).min(axis=0)
        chosen = (fullest & ((1 << NUMBER_BITS) - 1)).astype(np.int64)
        keys[chosen, rows[:active]] = fullest
        index[items] = chosen
        if chosen.max() == len(keys) - 1:
            keys = np.concatenate((keys, empty[None] + len(keys)))
    return index
