"""Attention with a window that is shorter than the documents: only the keys in its reach travel.

With a window of ``w`` keys, the first ``w - 1`` queries of a run (``runs``) look at keys before the run, which may be
other members'; all other queries look at the run's own keys only::

    positions     ... 3 4 5 6 | 7 8 9 10 11 12 |          a run of 7 .. 12, w = 4
                        ^^^^^   -----                     the outer queries 7, 8, 9 need 4, 5, 6
                                      --------            the inner queries 10, 11, 12 need nothing

No query is in two blocks, so no partial results are merged. The steps of a member:

  exchange    send the rows that the windows of other members reach, and receive theirs: all messages of the member are
              one operation. Empty ones are not posted: with a window shorter than a segment there are two
  inner       meanwhile, compute the inner queries of shared sequences and of all others
  outer       wait; copy the keys of the outer queries together; compute these queries
  backward    the same exchange again, inner and outer blocks, then the exchange in the other direction, in which the
              gradients of the rows that arrived travel back to their owners

Bytes that one member sends per layer, with ``b`` bytes a row (K and V together): at most ``2 (w - 1) b`` a document in
forward, whatever its length, if segments are at least that long; backward sends the same, and as many rows of gradients
in the dtype of sums. This finishes under NCCL as a ring does (``runtime.mesh``): calls have one order on all members.

Shape letters: T rows of the micro-batch, H query heads, G key/value heads, D and Dv widths.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bytescale.attention.blocks import BlockSet, RowRanges
from bytescale.attention.kernels import OfQueries, add_rows, lse_dtype
from bytescale.attention.rings.exchange import Transfer
from bytescale.attention.rings.grid import BlockWork
from bytescale.attention.rings.grid_messages import Grid
from bytescale.attention.rings.messages import Kind, keys_of, message_width, values_of
from bytescale.attention.rings.runs import OwnRuns, Ranges

_Pair = tuple[tuple[int, int], tuple[int, int]]


class Windowed:
    """One micro-batch's blocks and messages for one window. The buffers of messages are those of the grid.

    Attributes:
        inner: blocks whose keys are the run's own.
        outer: blocks of the other queries; their keys are copied together.
    """

    def __init__(self, runs: OwnRuns, window: int, grid: Grid | None) -> None:
        before = runs.rows_before(window - 1)
        self._grid, self._sent, self._arriving = grid, before.sent, before.arriving
        self._sent_counts = [rows.num_rows for rows in before.sent]
        inner: list[_Pair] = []
        outer: list[_Pair] = []
        sources = Ranges()  # of the outer blocks' keys, in order
        num_gathered = 0
        for rows, earlier in zip(runs.all_rows, before.places, strict=True):
            middle = min(rows.stop, rows.start + window - 1) if earlier else rows.start
            if middle < rows.stop:
                inner.append(((middle, rows.stop), (rows.start, rows.stop)))
            if rows.start < middle:
                own = [*earlier, (rows.start, middle)]
                sources += own
                first, num_gathered = num_gathered, num_gathered + sum(stop - start for start, stop in own)
                outer.append(((rows.start, middle), (first, num_gathered)))
        self.inner, self.outer = _blocks(inner, window), _blocks(outer, window)
        self._num_gathered = num_gathered
        self._own = _Copied(sources, 0, runs.num_rows)
        self._arrived = _Copied(sources, runs.num_rows, runs.num_rows + sum(before.arriving))
        self._num_own = max(self._own.stop, 0 if grid is None else grid.num_tokens)
        """Rows from the first on, behind which none is looked at from another run."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: BlockWork) -> tuple[Tensor, Tensor]:
        """Return ``out [T, H, Dv]`` and ``lse [T, H]`` of all rows of the micro-batch."""
        if self._num_own == 0:
            return work.forward(q, k, v, self.inner)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        lse = q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))

        def compute(keys: Tensor, values: Tensor, blocks: BlockSet) -> None:
            rows = blocks.query_rows(q.device)
            out[rows], lse[rows] = work.forward(q, keys, values, blocks)

        transfer, arrived = self._start_kv(k, v, Kind.FORWARD_KV)
        compute(k, v, self.inner)
        if transfer is not None:
            transfer.wait()
        if self.outer:
            compute(self._gather(k, keys_of(arrived, k)), self._gather(v, values_of(arrived, v)), self.outer)
        return out, lse

    def backward(self, queries: OfQueries, k: Tensor, v: Tensor, work: BlockWork) -> tuple[Tensor, Tensor, Tensor]:
        """``dq, dk, dv`` of all rows."""
        if self._num_own == 0:
            return work.backward(queries, k, v, self.inner)
        device, wide = k.device, queries.lse.dtype
        dq, dk, dv = torch.empty_like(queries.q), torch.zeros_like(k), torch.zeros_like(v)
        transfer, arrived = self._start_kv(k, v, Kind.BACKWARD_KV)

        # Inner blocks: their keys are own rows, each in at most one block.
        query_rows, key_rows = self.inner.query_rows(device), self.inner.key_rows(device)
        dq[query_rows], dk[key_rows], dv[key_rows] = work.backward(queries, k, v, self.inner)

        # Outer blocks: their keys are own rows and rows that have arrived, each in any number of blocks.
        if transfer is not None:
            transfer.wait()
        own = dk[: self._num_own].to(wide), dv[: self._num_own].to(wide)
        of_arrived = tuple(like.new_zeros(len(arrived), *like.shape[1:]) for like in own)
        if self.outer:
            keys, values = self._gather(k, keys_of(arrived, k)), self._gather(v, values_of(arrived, v))
            dq[self.outer.query_rows(device)], *parts = work.backward(queries, keys, values, self.outer)
            for part, total, total_arrived in zip(parts, own, of_arrived, strict=True):
                self._own.add_to(total, part)
                self._arrived.add_to(total_arrived, part)
        if self._grid is not None:
            self._return_gradients(self._grid, own, of_arrived)
        dk[: self._num_own], dv[: self._num_own] = own
        return dq, dk, dv

    def _start_kv(self, k: Tensor, v: Tensor, kind: Kind) -> tuple[Transfer | None, Tensor]:
        """Send the rows that others reach. Return the transfer and the rows that it fills, ``[n, G (D + Dv)]``."""
        if self._grid is None:
            return None, k.new_empty(0, message_width(k, v))
        outgoing, incoming = self._buffers(self._grid, "kv", k, v)
        messages = outgoing[: sum(self._sent_counts)].split(self._sent_counts)
        for rows, message in zip(self._sent, messages, strict=True):
            keys_of(message, k).copy_(k[rows.on(k.device)])
            values_of(message, v).copy_(v[rows.on(k.device)])
        arriving = incoming[: sum(self._arriving)]
        return self._grid.swap(messages, arriving.split(self._arriving), kind), arriving

    def _return_gradients(self, grid: Grid, own: tuple[Tensor, ...], of_arrived: tuple[Tensor, ...]) -> None:
        """Send the gradients of the rows that arrived to their owners. Add what others return to ``own``.

        Both are those of K ``[n, G, D]`` and of V ``[n, G, Dv]``.
        """
        outgoing, incoming = self._buffers(grid, "gradients", *own)
        messages, returned = outgoing[: sum(self._arriving)], incoming[: sum(self._sent_counts)]
        parts = returned.split(self._sent_counts)
        for part_of, total, gradient in zip((keys_of, values_of), own, of_arrived, strict=True):
            part_of(messages, total).copy_(gradient)
        grid.swap(messages.split(self._arriving), parts, Kind.BACKWARD_GRADIENTS, forwards=False).wait()
        for rows, part in zip(self._sent, parts, strict=True):
            for part_of, total in zip((keys_of, values_of), own, strict=True):
                add_rows(total, rows.on(total.device), part_of(part, total))

    def _buffers(self, grid: Grid, what: str, k: Tensor, v: Tensor) -> list[Tensor]:
        """A buffer for all rows that go one way, and one for all that go the other way."""
        rows = max(sum(self._sent_counts), sum(self._arriving))
        return grid.buffers.take(what, 2, k, (rows, message_width(k, v)), k.dtype)

    def _gather(self, own: Tensor, arrived: Tensor) -> Tensor:
        """Copy the outer blocks' keys or values together from own rows and from rows that arrived."""
        rows = own.new_empty(self._num_gathered, *own.shape[1:])
        self._own.copy_to(rows, own)
        self._arrived.copy_to(rows, arrived)
        return rows


class _Copied:
    """Which of the rows ``[first, last)`` are copied, and where to. Some are copied more than once."""

    def __init__(self, sources: Ranges, first: int, last: int) -> None:
        stops = np.cumsum([stop - start for start, stop in sources]).tolist()
        kept = [(start - first, stop - first, end) for (start, stop), end in zip(sources, stops, strict=True)
                if first <= start < last]  # fmt: skip
        self.stop = max((stop for _, stop, _ in kept), default=0)
        self._rows = RowRanges([(start, stop) for start, stop, _ in kept])
        self._places = RowRanges([(end - (stop - start), end) for start, stop, end in kept])

    def copy_to(self, gathered: Tensor, rows: Tensor) -> None:
        gathered[self._places.on(rows.device)] = rows[self._rows.on(rows.device)]

    def add_to(self, total: Tensor, gathered: Tensor) -> None:
        """Add the gradient of what was copied to that of the rows."""
        rows, part = self._rows.on(total.device), gathered[self._places.on(total.device)]
        if isinstance(rows, slice):
            total[rows].add_(part)  # adjacent ranges do not repeat
        else:
            total.index_add_(0, rows, part.to(total.dtype))


def _blocks(pairs: list[_Pair], window: int) -> BlockSet:
    ranges = np.array(pairs, dtype=np.int64).reshape(-1, 2, 2)
    return BlockSet.of(ranges[:, 0], ranges[:, 1], causal=True, window=window)
