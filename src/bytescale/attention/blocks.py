"""Which rectangles of the attention matrix one call of a kernel computes.

A block pairs a range of query rows with a range of key rows. Either the block is the causal triangle of one sequence
(both ranges are the same rows) or every query sees every key. Blocks without a query or without a key are left out at
construction: CPU flash attention dies (SIGFPE) on them, and a row with no key has no softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from bytescale.attention.copies import to_device

Rows = slice | torch.Tensor


@dataclass
class BlockSet:
    """Blocks whose query ranges do not overlap, and whose key ranges do not either, in rising order.

    ``queries`` and ``keys`` are ``[start, stop)`` pairs of rows. The rows of all blocks together are ``query_rows`` and
    ``key_rows``: a slice where the ranges touch (no copy needed), an index tensor otherwise.
    """

    queries: list[tuple[int, int]]
    keys: list[tuple[int, int]]
    causal: bool
    _rows: dict[tuple[str, torch.device], Rows] = field(default_factory=dict, repr=False)
    _cu_seqlens: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(queries: NDArray[np.int64], keys: NDArray[np.int64], *, causal: bool) -> BlockSet:
        """From two ``[B, 2]`` arrays of row ranges; blocks with an empty side are dropped."""
        kept = (queries[:, 1] > queries[:, 0]) & (keys[:, 1] > keys[:, 0])
        return BlockSet(
            [(int(start), int(stop)) for start, stop in queries[kept]],
            [(int(start), int(stop)) for start, stop in keys[kept]],
            causal,
        )

    def __bool__(self) -> bool:
        return bool(self.queries)

    @property
    def num_query_rows(self) -> int:
        return sum(stop - start for start, stop in self.queries)

    @property
    def num_key_rows(self) -> int:
        return sum(stop - start for start, stop in self.keys)

    def query_rows(self, device: torch.device) -> Rows:
        """Rows of all query ranges, in order: what picks them from a ``[T, ...]`` tensor."""
        return self._cached("queries", self.queries, device)

    def key_rows(self, device: torch.device) -> Rows:
        """Rows of all key ranges, in order."""
        return self._cached("keys", self.keys, device)

    @property
    def max_query_rows(self) -> int:
        return max((stop - start for start, stop in self.queries), default=0)

    @property
    def max_key_rows(self) -> int:
        return max((stop - start for start, stop in self.keys), default=0)

    def cu_seqlens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets ``[B + 1]`` int32 of the blocks inside the query rows and inside the key rows (made once)."""
        if device not in self._cu_seqlens:
            self._cu_seqlens[device] = (_offsets(self.queries, device), _offsets(self.keys, device))
        return self._cu_seqlens[device]

    def _cached(self, side: str, ranges: list[tuple[int, int]], device: torch.device) -> Rows:
        if (side, device) not in self._rows:
            self._rows[side, device] = _rows_of(ranges, device)
        return self._rows[side, device]


def causal_triangles(lengths: Sequence[int] | NDArray[np.int64]) -> BlockSet:
    """One causal triangle per sequence, sequences lying one after the other."""
    edges = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))])
    ranges = np.stack([edges[:-1], edges[1:]], axis=1)
    return BlockSet.of(ranges, ranges, causal=True)


def ring_blocks(chunks: tuple[NDArray[np.int64], NDArray[np.int64]], member: int, source: int) -> BlockSet:
    """What member ``member``'s queries see of the keys that member ``source`` holds, two different members.

    Chunks lie in the sequence in the order 0, 1, .., N-1, N-1, .., 1, 0 (``plan.layout``), so that causality allows:
    ``source < member``: both of our chunks see all of the source's front chunk and nothing of its back chunk;
    ``source > member``: our back chunk sees both of the source's chunks, our front chunk sees nothing.

    Args:
        chunks: front and back chunk of every member, each ``[K, N]`` tokens. On a member the rows of sequence k are
            its front chunk, then its back chunk, and sequences lie one after the other.
    """
    front, back = chunks
    ours = np.concatenate([[0], np.cumsum(front[:, member] + back[:, member])])
    theirs = np.concatenate([[0], np.cumsum(front[:, source] + back[:, source])])
    if source < member:
        queries = np.stack([ours[:-1], ours[1:]], axis=1)
        keys = np.stack([theirs[:-1], theirs[:-1] + front[:, source]], axis=1)
    else:
        queries = np.stack([ours[:-1] + front[:, member], ours[1:]], axis=1)
        keys = np.stack([theirs[:-1], theirs[1:]], axis=1)
    return BlockSet.of(queries, keys, causal=False)


def _rows_of(ranges: list[tuple[int, int]], device: torch.device) -> Rows:
    touching = all(left[1] == right[0] for left, right in pairwise(ranges))
    if touching:
        return slice(ranges[0][0], ranges[-1][1]) if ranges else slice(0, 0)
    return to_device(torch.cat([torch.arange(start, stop) for start, stop in ranges]), device)


def _offsets(ranges: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    counts = torch.tensor([0] + [stop - start for start, stop in ranges], dtype=torch.int64)
    return to_device(counts.cumsum(0).to(torch.int32), device)
