"""Dealing whole sequences to the ranks, and cutting each rank's share into micro-batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bytescale.planner.packing import best_fit

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

ONE_BY_ONE = 16
"""Ranks pack one by one when one of them has this many times more sequences than there are ranks."""

_FULL = np.iinfo(np.int64).max

CHUNK_RATIO = 0.8  # sequences whose times differ by less are dealt in one go


def deal(
    seconds: FloatArray,
    free_at: FloatArray,
    *,
    speeds: FloatArray | None = None,
    lengths: IntArray | None = None,
    capacity: IntArray | None = None,
) -> tuple[IntArray, FloatArray]:
    """Longest first to the rank that is free first, in bulk.

    One go deals all sequences whose times are within ``CHUNK_RATIO`` of each other, as if they were equal: pour that
    much time over the ranks like water, and give each rank the whole number of sequences that fits under the surface,
    the odd ones to the lowest. The next, smaller ones level out what is left.

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
    speeds = np.ones(len(free_at)) if speeds is None else speeds
    free_at = free_at.copy()
    rising = np.argsort(free_at, kind="stable")
    falling = -seconds
    start = 0
    while start < len(seconds):
        stop = int(np.searchsorted(falling, falling[start] * CHUNK_RATIO, side="right"))
        chunk = seconds[start:stop]
        able = rising
        if lengths is not None and capacity is not None:
            able = rising[capacity[rising] >= lengths[start]]
        ranks[start:stop] = able[_pour(len(chunk), chunk[0], free_at[able], speeds[able])]
        free_at += np.bincount(ranks[start:stop], weights=chunk, minlength=len(free_at)) / speeds
        rising = rising[np.argsort(free_at[rising], kind="stable")]  # nearly sorted: 10x faster than from scratch
        start = stop
    return ranks, free_at


def _pour(count: int, item: float, heights: FloatArray, speeds: FloatArray) -> IntArray:
    """Place in ``heights`` (rising) of each of ``count`` sequences of about the time ``item``."""
    area, width = np.cumsum(speeds * heights), np.cumsum(speeds)
    volume = width * heights - area  # to fill up to each height
    wet = int(np.searchsorted(volume, count * item, side="right"))
    surface = (count * item + area[wet - 1]) / width[wet - 1]
    speeds = speeds[:wet]
    shares = np.maximum(np.floor((surface - heights[:wet]) * speeds / item), 0).astype(np.int64)
    odd = count - int(shares.sum())
    lowest = np.argsort(heights[:wet] + (shares + 1) * item / speeds, kind="stable")[:odd]
    shares[lowest] += 1
    # Largest sequences first, one per rank and round, so that no rank gets all the large ones.
    rounds = np.arange(count) - np.repeat(np.cumsum(shares) - shares, shares)
    return np.repeat(np.arange(wet), shares)[np.argsort(rounds, kind="stable")]


def micro_batches(lengths: IntArray, ranks: IntArray, capacity: IntArray) -> IntArray:
    """Index of the micro-batch, on its own rank, of each sequence ``[n]``: best fit, in the order given.

    All ranks pack at once: pass k puts the k-th sequence of every rank into its fullest micro-batch that still holds
    it. A few ranks with very many sequences pack one after the other instead.

    Args:
        lengths: ``[n]`` tokens, sorted by rank, best longest first on each.
        ranks: ``[n]`` rising.
        capacity: ``[R]`` tokens of one micro-batch.
    """
    index = np.zeros(len(lengths), dtype=np.int64)
    if len(lengths) == 0:
        return index
    heads = np.flatnonzero(np.append(True, ranks[1:] != ranks[:-1]))
    counts = np.diff(np.append(heads, len(ranks)))
    if counts.max() > ONE_BY_ONE * len(heads):
        for head, count in zip(heads.tolist(), counts.tolist(), strict=True):
            index[head : head + count] = best_fit(lengths[head : head + count], int(capacity[ranks[head]]))
        return index
    most_first = np.argsort(-counts, kind="stable")
    heads, counts = heads[most_first], counts[most_first]
    packing = np.searchsorted(-counts, -np.arange(counts[0]) - 1, side="right")  # ranks that still have one, per pass
    size = capacity[ranks[heads]]
    room = size[:, None].copy()  # [ranks, micro-batches opened so far, and one empty]
    for k, active in enumerate(packing.tolist()):
        items = heads[:active] + k
        left = room[:active] - lengths[items][:, None]
        chosen = np.where(left < 0, _FULL, left).argmin(axis=1)
        rows = np.arange(active)
        room[rows, chosen] = left[rows, chosen]
        index[items] = chosen
        if chosen.max() == room.shape[1] - 1:
            room = np.concatenate((room, size[:, None]), axis=1)
    return index
