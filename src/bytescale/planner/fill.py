"""Dealing whole sequences to the ranks, and cutting each rank's share into micro-batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

CHUNK_RATIO = 0.8  # sequences whose times differ by less are dealt in one go


def deal(seconds: FloatArray, free_at: FloatArray) -> tuple[IntArray, FloatArray]:
    """Longest first to the rank that is free first, in bulk.

    One go deals all sequences whose times are within ``CHUNK_RATIO`` of each other, as if they were equal: pour that
    much time over the ranks like water, and give each rank the whole number of sequences that fits under the surface,
    the odd ones to the lowest. The next, smaller ones level out what is left.

    Args:
        seconds: ``[n]`` time of each sequence, descending.
        free_at: ``[R]`` when each rank is free.

    Returns:
        rank of each sequence ``[n]``, and when each rank is free in the end ``[R]``.
    """
    ranks = np.empty(len(seconds), dtype=np.int64)
    free_at = free_at.copy()
    rising = np.argsort(free_at, kind="stable")
    falling = -seconds
    start = 0
    while start < len(seconds):
        stop = int(np.searchsorted(falling, falling[start] * CHUNK_RATIO, side="right"))
        chunk = seconds[start:stop]
        ranks[start:stop] = rising[_pour(len(chunk), chunk[0], free_at[rising])]
        free_at += np.bincount(ranks[start:stop], weights=chunk, minlength=len(free_at))
        rising = rising[np.argsort(free_at[rising], kind="stable")]  # nearly sorted: 10x faster than from scratch
        start = stop
    return ranks, free_at


def _pour(count: int, item: float, heights: FloatArray) -> IntArray:
    """Place in ``heights`` (rising) of each of ``count`` sequences of about the time ``item``."""
    volume = np.arange(len(heights)) * heights - (np.cumsum(heights) - heights)  # to fill up to each height
    wet = int(np.searchsorted(volume, count * item, side="right"))
    surface = (count * item + heights[:wet].sum()) / wet
    shares = np.floor((surface - heights[:wet]) / item).astype(np.int64)
    odd = count - int(shares.sum())
    lowest = np.argsort(heights[:wet] + shares * item, kind="stable")[:odd]
    shares[lowest] += 1
    # Largest sequences first, one per rank and round, so that no rank gets all the large ones.
    rounds = np.arange(count) - np.repeat(np.cumsum(shares) - shares, shares)
    return np.repeat(np.arange(wet), shares)[np.argsort(rounds, kind="stable")]


def micro_batches(lengths: IntArray, ranks: IntArray, capacity: IntArray) -> IntArray:
    """Index of the micro-batch, on its own rank, of each sequence ``[n]``.

    A rank takes its sequences in the order given and opens a new micro-batch whenever the next one does not fit. All
    ranks do so at once: pass k opens everybody's k-th micro-batch.

    Args:
        lengths: ``[n]`` tokens, sorted by rank.
        ranks: ``[n]`` rising.
        capacity: ``[R]`` tokens of one micro-batch.
    """
    ends = np.cumsum(lengths)
    room = ends - lengths + capacity[ranks]
    rank_stop = np.searchsorted(ranks, ranks, side="right")
    following = np.minimum(np.searchsorted(ends, room, side="right"), rank_stop)  # first that does not fit
    opens = np.zeros(len(lengths), dtype=bool)
    heads = np.flatnonzero(np.append(True, ranks[1:] != ranks[:-1])) if len(ranks) else np.zeros(0, dtype=np.int64)
    first_of_rank = np.zeros(len(lengths), dtype=np.int64)
    while len(heads):
        opens[heads] = True
        nexts = following[heads]
        heads = nexts[nexts < rank_stop[heads]]
    number = np.cumsum(opens) - 1
    if len(ranks):
        starts = np.flatnonzero(np.append(True, ranks[1:] != ranks[:-1]))
        first_of_rank = np.repeat(number[starts], np.diff(np.append(starts, len(ranks))))
    return number - first_of_rank
