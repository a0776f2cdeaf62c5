"""The array types that most of the project shares. The docstring of each use says the shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class MappedOffsets:
    """Offsets of D documents, one sequence each, that lie in an ``.idx``, of which processes share the pages."""

    pointers: IntArray  # [D] memory-mapped: byte at which each starts
    itemsize: int
    num_tokens: int

    def __len__(self) -> int:
        return len(self.pointers) + 1

    def __getitem__(self, wanted: Rows) -> IntArray:
        rows = numbers_of(wanted, len(self))
        found, is_start = np.full(rows.shape, self.num_tokens), rows < len(self.pointers)
        found[is_start] = self.pointers[rows[is_start]] // self.itemsize
        return found


Offsets = IntArray | MappedOffsets
"""``[D + 1]`` first row of each of D runs, then the number of all rows."""


def blocks(count: int, size: int = 2**18) -> Iterator[slice]:
    """Cut ``count`` rows into slices of at most ``size``, so that temporary arrays do not grow with the table."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def lengths_in_blocks(offsets: Offsets) -> Iterator[IntArray]:
    """The lengths ``[D]`` between ``offsets [D + 1]``, cut into ``blocks``."""
    return (np.diff(offsets[own.start : own.stop + 1]) for own in blocks(len(offsets) - 1))
