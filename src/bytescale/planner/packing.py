"""Best-fit packing, which Algorithm 1 and the static mesh use to put short sequences together."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from bytescale.cost import Cluster

IntArray = NDArray[np.int64]


def best_fit(sizes: IntArray, capacity: int) -> IntArray:
    """Bin of each item, items taken in the order given (longest first: best-fit decreasing).

    Each item goes to the fullest bin that still holds it, else to a new one. Bins are numbered in order of opening;
    of equally full bins the oldest is taken.

    Args:
        sizes: ``[n]`` each at most ``capacity``.
        capacity: of every bin.

    Returns:
        ``[n]`` int64.
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
    """Items bin by bin, in the order given inside each, and the number in each bin."""
    order = np.argsort(bins, kind="stable")
    return items[order], np.bincount(bins)


def smallest_capacity(cluster: Cluster) -> int:
    """What the paper's planners, which know only equal ranks, may put into any micro-batch."""
    return int(cluster.capacity_tokens.min())
