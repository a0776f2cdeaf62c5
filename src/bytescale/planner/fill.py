"""Whole sequences: into holes between shared groups, dealt to the ranks behind them, and cut into micro-batches."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from bytescale.planner.order import rising
from bytescale.planner.packing import best_fit

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

PASS = 20
"""Time of one pass of all ranks over that of packing one sequence by itself."""

CHUNK_RATIO = 0.5
"""Sequences whose times differ by less are dealt in one go (0.8 ends no earlier and takes 2.3 times as long)."""

NUMBER_BITS = 20
"""Of a micro-batch's number, below its room in one key."""


def deal(
    seconds: FloatArray,
    free_at: FloatArray,
    *,
    speeds: FloatArray | None = None,
    lengths: IntArray | None = None,
    capacity: IntArray | None = None,
) -> tuple[IntArray, FloatArray]:
    """Longest first to the rank that is free first, in bulk.

    One go deals all sequences whose times are within ``CHUNK_RATIO`` of each other: pour that much time over the ranks
    like water, and give each rank the whole number of sequences that fits under the surface, the odd ones to those
    with most room for one more. Of the chunk, the longest go to the ranks that are left furthest below the surface,
    the shortest to those furthest above it. The next, smaller ones level out what is left.

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
    # Ranks that stick out of all that time get none of it.
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
    """Place in ``heights`` ``[n]`` of each sequence of ``chunk`` ``[m]``, which take about equally long."""
    volume = float(chunk.sum())
    item = volume / len(chunk)
    room = np.maximum(_surface(volume, heights, speeds) - heights, 0.0) * (speeds / item)  # in sequences
    shares = room.astype(np.int64)
    # Most room for one more first, those without any last. 16 bits of it are enough, and sort by radix.
    by_room = np.argsort(((1.0 - (room - shares)) * 0xFFFE + (room == 0)).astype(np.uint16), kind="stable")
    odd = len(chunk) - int(shares.sum())
    shares[by_room[:odd]] += 1
    lowest_first = np.concatenate((by_room[odd:], by_room[:odd]))  # against the surface; the odd ones are above it
    shares = shares[lowest_first]
    places = np.repeat(lowest_first, shares)
    # One per rank and round, so that no rank gets all the long ones.
    rounds = np.arange(len(chunk)) - np.repeat(np.cumsum(shares) - shares, shares)
    return places[rising(rounds)]


def _surface(volume: float, heights: FloatArray, speeds: FloatArray) -> float:
    """Where ``volume`` poured over vessels ``speeds`` wide, whose floors are at ``heights``, comes to rest.

    With all of them wet it would be the highest; leave out those that stick out until none does.
    """
    weights = heights * speeds
    while True:
        surface = (volume + float(weights.sum())) / float(speeds.sum())
        below = heights < surface
        if below.all():
            return surface
        heights, weights, speeds = heights[below], weights[below], speeds[below]


def into_holes(seconds: FloatArray, holes: FloatArray) -> IntArray:
    """Hole of each sequence ``[n]``, -1 for none: the largest hole first takes the longest that fit, and the next.

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
    """Index of the micro-batch, on its own rank, of each sequence ``[n]``: best fit, in the order given.

    All ranks pack at once: pass k puts the k-th sequence of every rank into its fullest micro-batch that still holds
    it. The few ranks that have by far the most sequences would need passes of their own; they pack one by one.

    Args:
        lengths: ``[n]`` tokens, sorted by rank, best longest first on each.
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
    packing = np.searchsorted(-counts, -passes, side="right")  # ranks that have so many sequences
    # A micro-batch is the number (room left, its index): of those with room the smallest is the fullest, and the oldest
    # of equally full ones. Without room it wraps around to a huge one.
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
