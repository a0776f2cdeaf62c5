"""Which blocks of the attention matrix one call of a kernel computes.

A block pairs a range of query rows with a range of key rows. There are three kinds of blocks:

* A rectangle, in which every query sees every key.
* A causal block. Its last query and its last key are the same token, and every query sees the keys up to its own. Where
  both ranges are the same rows, this is the triangle of a whole sequence.
* A causal block with a window. In addition, a query sees at most the last ``window`` keys up to its own.

Construction drops blocks without queries or without keys: CPU flash attention crashes on them (SIGFPE), and a row
without keys has no softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from bytescale.attention.copies import to_device
from bytescale.common.arrays import IntArray

Rows = slice | torch.Tensor


@dataclass
class BlockSet:
    """Blocks in rising order. No two query ranges overlap, and no two key ranges overlap.

    ``queries`` and ``keys`` are ``[start, stop)`` pairs of rows. ``query_rows`` and ``key_rows`` give the rows of all
    blocks: as a slice where the ranges are adjacent, so that no copy is needed, and as an index tensor otherwise.
    Causal blocks have at least as many keys as queries. Only causal blocks may have a ``window``.
    """

    queries: list[tuple[int, int]]
    keys: list[tuple[int, int]]
    causal: bool
    window: int | None = None
    _cu_seqlens: dict[torch.device, tuple[torch.Tensor, torch.Tensor, int, int]] = field(
        default_factory=dict, repr=False
    )

    def __post_init__(self) -> None:
        self._query_ranges, self._key_ranges = RowRanges(self.queries), RowRanges(self.keys)

    @staticmethod
    def of(queries: IntArray, keys: IntArray, *, causal: bool, window: int | None = None) -> BlockSet:
        """Make blocks from two ``[B, 2]`` arrays of row ranges. Blocks with an empty range are dropped."""
        kept = (queries[:, 1] > queries[:, 0]) & (keys[:, 1] > keys[:, 0])
        return BlockSet(
            [(int(start), int(stop)) for start, stop in queries[kept]],
            [(int(start), int(stop)) for start, stop in keys[kept]],
            causal,
            window,
        )

    def __len__(self) -> int:
        return len(self.queries)

    def places(self) -> Iterator[tuple[slice, slice, slice, slice]]:
        """Of each block: the rows of its queries and of its keys, and their places among those of all blocks."""
        row = key_row = 0
        for (start, stop), (first, last) in zip(self.queries, self.keys, strict=True):
            rows, key_rows = slice(row, row + stop - start), slice(key_row, key_row + last - first)
            yield slice(start, stop), slice(first, last), rows, key_rows
            row, key_row = rows.stop, key_rows.stop

    @property
    def num_query_rows(self) -> int:
        return self._query_ranges.num_rows

    @property
    def num_key_rows(self) -> int:
        return self._key_ranges.num_rows

    def query_rows(self, device: torch.device) -> Rows:
        """Return the index that picks the rows of all query ranges, in order, from a ``[T, ...]`` tensor."""
        return self._query_ranges.on(device)

    def key_rows(self, device: torch.device) -> Rows:
        """Return the index that picks the rows of all key ranges, in order."""
        return self._key_ranges.on(device)

    def cu_seqlens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Offsets of the blocks in query rows and in key rows, ``[B + 1]`` int32 each, and most rows of both."""
        if device not in self._cu_seqlens:
            counts = [[stop - start for start, stop in part] for part in (self.queries, self.keys)]
            offsets = [torch.tensor([0, *own]).cumsum(0).to(torch.int32) for own in counts]
            of_queries, of_keys = (to_device(own, device) for own in offsets)
            most, most_keys = (max(own, default=0) for own in counts)
            self._cu_seqlens[device] = of_queries, of_keys, most, most_keys
        return self._cu_seqlens[device]


class RowRanges:
    """Ranges ``[start, stop)`` of rows, in any order, and the index that picks them."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self.num_rows = sum(stop - start for start, stop in ranges)
        self._ranges = ranges
        self._rows: dict[torch.device, Rows] = {}

    def on(self, device: torch.device) -> Rows:
        """Return a slice where the ranges are adjacent and rise, otherwise an index tensor (cached)."""
        if device not in self._rows:
            ranges = self._ranges
            if any(left[1] != right[0] for left, right in pairwise(ranges)):
                self._rows[device] = to_device(torch.cat([torch.arange(*own) for own in ranges]), device)
            else:
                self._rows[device] = slice(ranges[0][0], ranges[-1][1]) if ranges else slice(0, 0)
        return self._rows[device]


def causal_triangles(lengths: Sequence[int] | IntArray, window: int | None = None) -> BlockSet:
    """Make one causal block per sequence, a triangle or a window's band of it. Sequences lie one after the other."""
    edges = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))])
    ranges = np.stack([edges[:-1], edges[1:]], axis=1)
    return BlockSet.of(ranges, ranges, causal=True, window=window)
