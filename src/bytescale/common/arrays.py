"""The array types that most of the project shares. The docstring of each use says the shape."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
"""Whole numbers: lengths in tokens, offsets, ranks."""
FloatArray = NDArray[np.float64]
"""Seconds, bytes, shares."""
Rows = NDArray[np.integer] | slice


def numbers_of(rows: Rows, count: int) -> IntArray:
    """Return int64 ``[N]``, the numbers of some rows of a table of ``count``."""
    return np.arange(*rows.indices(count)) if isinstance(rows, slice) else rows.astype(np.int64, copy=False)


def blocks(count: int, size: int = 2**18) -> Iterator[slice]:
    """Cut ``count`` rows into slices of at most ``size``, so that temporary arrays do not grow with the table."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
