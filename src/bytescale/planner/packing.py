"""Best-fit packing, by which planners put short sequences together."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.planner.batch import rising

PASS = 20
"""Time of one pass over all ranks, divided by the time of packing a single sequence, while there are few bins."""
BINS = 2000
"""So many micro-batches at the end make a pass longer by the time of packing a single sequence."""
NUMBER_BITS = 20
"""Low bits of a key that hold the number of a micro-batch; the bits above hold the room left in it."""


def best_fit(sizes: IntArray, capacity: int) -> IntArray:
    """``[n]`` int64 bin of each item of ``sizes [n]``, each at most ``capacity``, in the given order.

    An item goes to the fullest bin that has room for it, else to a new one. Bins are numbered in order of opening; of
    equally full bins the oldest is taken. Longest first, this is best-fit decreasing.
    """
    free: list[int] = []  # room left and, in the lower bits, bin: rising
    bins: list[int] = []
    shift = len(sizes).bit_length()
    opened = 0
    for size in (sizes << shift).tolist():
        place = bisect_left(free, size)
        if place < len(free):
            left = free.pop(place) - size
        else:
            left, opened = (capacity << shift) + opened - size, opened + 1
        bins.append(left & ((1 << shift) - 1))
        if left >> shift:
            insort(free, left)
    return np.array(bins, dtype=np.int64)


def micro_batches(lengths: IntArray, ranks: IntArray, capacity: IntArray) -> IntArray:
    """Index of the micro-batch, on its own rank, of each sequence ``[n]``: best fit, in the given order.

    All ranks pack at once: pass k puts the k-th sequence of every rank into its fullest micro-batch with enough room.
    The few ranks that have by far the most sequences would need passes for themselves, so they pack one by one. So do
    all ranks where micro-batches are so many that a pass, which looks at all of them, takes longer.

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
    a_pass = PASS + lengths.sum() / capacity.min() / BINS
    alone = int((a_pass * np.append(counts, 0) + np.append(0, np.cumsum(counts))).argmin())
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


def grouped(items: IntArray, bins: IntArray) -> tuple[IntArray, IntArray]:
    """Items bin by bin, in the given order inside each bin, and the number of items in each bin."""
    order = np.argsort(bins, kind="stable")
    return items[order], np.bincount(bins)
