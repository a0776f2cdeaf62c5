"""Best-fit packing, which Algorithm 1 and the static mesh use to put short sequences together."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.cost import Cluster


def best_fit(sizes: IntArray, capacity: int) -> IntArray:
    """The bin of each item. Items are taken in the given order (longest first is best-fit decreasing).

    Each item goes to the fullest bin that has room for it, else to a new one. Bins are numbered in order of opening; of
    equally full bins the oldest is taken.

    Args:
        sizes: ``[n]`` each at most ``capacity``.
        capacity: of every bin.

    Returns:
        ``[n]`` int64, the number of each item's bin.
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


def grouped(items: IntArray, bins: IntArray) -> tuple[IntArray, IntArray]:
    """Items bin by bin, in the given order inside each bin, and the number of items in each bin."""
    order = np.argsort(bins, kind="stable")
    return items[order], np.bincount(bins)


def smallest_capacity(cluster: Cluster) -> int:
    """Tokens that fit into a micro-batch of any rank: the limit for the paper's planners, which assume equal ranks."""
    return int(cluster.capacity_tokens.min())
