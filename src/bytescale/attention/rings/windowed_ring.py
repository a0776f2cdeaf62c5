"""Attention of a shared group where a window reaches less far than the sequences: only the keys in reach travel.

The steps of member ``i`` of ``N`` (``window`` says which rows and which blocks):

  exchange    for t = 1 .. N-1: send to member i + t the rows that its windows reach, receive such rows from i - t.
              Empty messages are not posted: with a window shorter than a segment there are two
  inner       meanwhile, compute the queries whose windows lie within own rows, and all local sequences
  outer       wait; copy the keys of the other queries together; compute these queries
  backward    the same exchange again, inner and outer blocks, then the exchange in the other direction, in which the
              gradients of the rows that arrived travel back to their owners

Bytes that one member sends per layer, with ``b`` bytes a row (K and V together) and a window of ``w`` keys: at most
``2 (w - 1) b`` a sequence in forward, whatever its length, if segments are at least that long; backward sends the same,
and as many rows of gradients in the dtype of sums.

This finishes under NCCL as a ring does (``runtime.mesh``): every message has a place (call, exchange, t), and all
members post theirs in rising order of places, the send and the receive of a step as one operation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytescale.attention.blocks import BlockSet, Rows
from bytescale.attention.kernels import OfQueries, add_rows, lse_dtype
from bytescale.attention.rings.exchange import Transfer
from bytescale.attention.rings.grid import BlockWork
from bytescale.attention.rings.grid_messages import Grid
from bytescale.attention.rings.messages import Kind, keys_of, message_width, values_of
from bytescale.attention.rings.window import WindowLayout


class WindowedRing:
    """One member's messages for one window. Their buffers are those of the member's grid."""

    def __init__(self, grid: Grid, layout: WindowLayout) -> None:
        self.grid = grid
        self.layout = layout
        self.sent_counts = [rows.num_rows for rows in layout.sent]
        self.num_arriving = sum(layout.arriving)

    def start_kv(self, k: Tensor, v: Tensor, kind: Kind) -> tuple[list[Transfer], Tensor]:
        """Send the rows that others reach. Return the transfers and the rows that they fill, ``[n, G (D + Dv)]``."""
        outgoing, incoming = self._buffers("kv", k, v, k.dtype)
        messages = outgoing[: sum(self.sent_counts)].split(self.sent_counts)
        for rows, message in zip(self.layout.sent, messages, strict=True):
            keys_of(message, k).copy_(k[rows.on(k.device)])
            values_of(message, v).copy_(v[rows.on(k.device)])
        arriving = incoming[: self.num_arriving]
        return self._start(messages, arriving.split(self.layout.arriving), kind, forwards=True), arriving

    def return_gradients(self, dk: Tensor, dv: Tensor, of_arrived: tuple[Tensor, Tensor]) -> None:
        """Send the gradients of the rows that arrived to their owners. Add what others return to ``dk`` and ``dv``.

        Args:
            dk: ``[n, G, D]`` sums for this member's shared rows; dv: ``[n, G, Dv]``.
            of_arrived: the gradients of K and V of the rows that arrived.
        """
        outgoing, incoming = self._buffers("gradients", dk, dv, dk.dtype)
        messages = outgoing[: self.num_arriving]
        keys_of(messages, dk).copy_(of_arrived[0])
        values_of(messages, dv).copy_(of_arrived[1])
        returned = incoming[: sum(self.sent_counts)].split(self.sent_counts)
        parts = messages.split(self.layout.arriving)
        for transfer in self._start(parts, returned, Kind.BACKWARD_GRADIENTS, forwards=False):
            transfer.wait()
        for rows, part in zip(self.layout.sent, returned, strict=True):
            add_rows(dk, rows.on(dk.device), keys_of(part, dk))
            add_rows(dv, rows.on(dv.device), values_of(part, dv))

    def _start(
        self, messages: tuple[Tensor, ...], arriving: tuple[Tensor, ...], kind: Kind, *, forwards: bool
    ) -> list[Transfer]:
        """Post each step's send to member ``i + t`` and receive from ``i - t``, or the other way round."""
        grid, transfers = self.grid, []
        for step, (message, room) in enumerate(zip(messages, arriving, strict=True), start=1):
            if not (len(message) or len(room)):
                continue
            distance = step if forwards else -step
            to, source = ((grid.member + offset) % grid.size for offset in (distance, -distance))
            transfers.append(grid.start(message, to, room, source, kind))
        return transfers

    def _buffers(self, what: str, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Buffers for all rows that go one way, and for all that go the other way."""
        rows = max(sum(self.sent_counts), self.num_arriving)
        outgoing, incoming = self.grid.buffers.take(what, 2, k, (rows, message_width(k, v)), dtype)
        return outgoing, incoming

    def gather(self, own: Tensor, arrived: Tensor) -> Tensor:
        """Copy the outer blocks' keys or values together from own rows and from rows that arrived."""
        gathered = self.layout.gathered
        rows = own.new_empty(gathered.num_rows, *own.shape[1:])
        rows[gathered.own_places.on(own.device)] = own[gathered.own.on(own.device)]
        rows[gathered.arrived_places.on(own.device)] = arrived[gathered.arrived.on(own.device)]
        return rows

    def scatter(self, gradient: Tensor, own: Tensor, of_arrived: Tensor) -> None:
        """Add the gradient of gathered rows to those of own rows and of rows that arrived."""
        gathered, device = self.layout.gathered, gradient.device
        _add_repeated(own, gathered.own.on(device), gradient[gathered.own_places.on(device)])
        _add_repeated(of_arrived, gathered.arrived.on(device), gradient[gathered.arrived_places.on(device)])


def windowed_forward(q: Tensor, k: Tensor, v: Tensor, windowed: WindowedRing, work: BlockWork) -> tuple[Tensor, Tensor]:
    """Return ``out [T, H, Dv]`` and ``lse [T, H]`` of all rows of the micro-batch."""
    layout = windowed.layout
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))

    def compute(keys: Tensor, values: Tensor, blocks: BlockSet) -> None:
        rows = blocks.query_rows(q.device)
        out[rows], lse[rows] = work.forward(q, keys, values, blocks)

    transfers, arrived = windowed.start_kv(k, v, Kind.FORWARD_KV)
    compute(k, v, layout.inner)
    for transfer in transfers:
        transfer.wait()
    if layout.outer:
        keys, values = windowed.gather(k, keys_of(arrived, k)), windowed.gather(v, values_of(arrived, v))
        compute(keys, values, layout.outer)
    return out, lse


def windowed_backward(
    dout: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    windowed: WindowedRing,
    work: BlockWork,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv`` of all rows, from ``out``'s gradient, ``q, k, v`` and the results of ``windowed_forward``."""
    q, k, v = inputs
    queries = OfQueries(dout, q, *results)
    layout, device, wide = windowed.layout, q.device, queries.lse.dtype
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    transfers, arrived = windowed.start_kv(k, v, Kind.BACKWARD_KV)

    # Inner blocks: their keys are own rows, each in at most one block.
    query_rows, key_rows = layout.inner.query_rows(device), layout.inner.key_rows(device)
    dq[query_rows], dk[key_rows], dv[key_rows] = work.backward(queries, k, v, layout.inner)

    # Outer blocks: their keys are own rows and rows that have arrived, each in at most two blocks.
    for transfer in transfers:
        transfer.wait()
    shared = windowed.grid.num_tokens
    own = dk[:shared].to(wide), dv[:shared].to(wide)
    dk_arrived, dv_arrived = (like.new_zeros(windowed.num_arriving, *like.shape[1:]) for like in own)
    if layout.outer:
        keys, values = windowed.gather(k, keys_of(arrived, k)), windowed.gather(v, values_of(arrived, v))
        parts = work.backward(queries, keys, values, layout.outer)
        dq[layout.outer.query_rows(device)] = parts[0]
        windowed.scatter(parts[1], own[0], dk_arrived)
        windowed.scatter(parts[2], own[1], dv_arrived)

    windowed.return_gradients(*own, (dk_arrived, dv_arrived))
    dk[:shared], dv[:shared] = own
    return dq, dk, dv


def _add_repeated(total: Tensor, rows: Rows, part: Tensor) -> None:
    """``total[rows] += part`` for rows that may repeat."""
    if isinstance(rows, slice):
        total[rows].add_(part)  # adjacent ranges do not repeat
    else:
        total.index_add_(0, rows, part.to(total.dtype))
