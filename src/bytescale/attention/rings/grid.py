"""Attention of a shared group's sequences, whose members form a grid: rows share queries, and columns share keys.

N members form a grid of P rows and Q columns. Member ``p Q + q`` is in row p and column q, and computes the queries of
its row (Q slices) against the keys of its column (P slices), so that every pair of slices meets on exactly one member.
All have the same work under the causal mask (``plan.layout``). Mesh-Attention (arXiv 2512.20968) has such grids for
groups that never change. With one column this is the ring of the paper's section 7.

Forward runs these steps on member (p, q). Places are counted modulo P and Q.

  own       It computes its own queries against its own keys: the causal triangles of its slices and of all its local
            sequences, in one call.
  row       For a = 1 .. Q-1 the queries of (p, q - a) arrive from (p, q - 1), in a ring around the row. It computes
            them against its own keys.
  column    For b = 1 .. P-1 the keys and values of (p - b, q) arrive from (p - 1, q), in a ring around the column. It
            merges the results of all queries of the row against them into a running softmax for each slice of queries.
  home      When a slice of queries has met the last keys, its output and LSE go home to (p, q - a), and a part of the
            own queries' result comes from (p, q + a). These parts are merged at the end.

While a member computes, the next message travels.

Backward runs the same steps. The row exchanges queries, ``dout``, LSE and ``delta``, the sum of ``dout * out`` over the
head's width, but no outputs (``_equivalent_output``). A second ring around the column, one step behind that of the
keys, carries their gradients: that of the keys of (p, q) starts at (p + 1, q), every member adds its share, and the sum
reaches (p, q) after P - 1 hops. The gradients of queries go home along the row.

Bytes that one member receives per layer, if every slice has n tokens, with ``b`` bytes a number, and ``w`` bytes a
number of a sum, in which gradients travel (4, or 8 for fp64):

  forward     ``n (P-1) G (D + Dv) b + n (Q-1) H (D b + Dv b + w)``
  backward    ``n (P-1) G (D + Dv) (b + w) + n (Q-1) H (D b + Dv b + D w + 2 w)``

The column needs two buffers for keys and values and two for gradients, whatever P is. The row needs Q - 1 buffers for
queries, and Q - 1 for results in each direction. Every call waits for all its transfers before it returns (under NCCL
the compute stream waits), so the next layer may use the same buffers.

This finishes under NCCL because all members post the same sequence of operations: those that meet have the same place
in one order, which is what the proof in ``runtime.mesh`` needs.

Shape letters: T rows of the micro-batch, of which the first n are shared; H query heads, G key/value heads, D width of
queries and keys, Dv of values, N members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bytescale.attention.blocks import BlockSet, Rows
from bytescale.attention.kernels import AttentionKernel, OfQueries, add_rows, lse_dtype, merge_rows
from bytescale.attention.rings.grid_messages import Grid, InTurn, RowMessages
from bytescale.attention.rings.messages import Kind, keys_of, pack, values_of


@dataclass(frozen=True)
class BlockWork:
    """How one call of attention computes blocks: the kernel and the scale."""

    kernel: AttentionKernel
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockSet) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(q, k, v, blocks, self.scale)

    def backward(self, queries: OfQueries, k: Tensor, v: Tensor, blocks: BlockSet) -> tuple[Tensor, Tensor, Tensor]:
        return self.kernel.backward(queries, k, v, blocks, self.scale)


def grid_forward(
    q: Tensor, k: Tensor, v: Tensor, triangles: BlockSet, grid: Grid, work: BlockWork
) -> tuple[Tensor, Tensor]:
    """``out [T, H, Dv]`` and ``lse [T, H]``; ``triangles``: what this rank can compute alone."""
    num_tokens = grid.num_tokens
    kv_buffers = grid.kv_buffers(k, v)
    pack(k[:num_tokens], v[:num_tokens], kv_buffers[0])
    row = _ForwardRow(q[:num_tokens], v.shape[2], grid, work)

    # Own: everything that this rank can compute alone, while the first message travels.
    transfers = _in_turn(grid, row.messages, kv_buffers, Kind.FORWARD_KV)
    out, lse = work.forward(q, k, v, triangles)
    row.add(q[:num_tokens], out[:num_tokens].to(lse.dtype), lse[:num_tokens])

    # Row: the other queries of the row arrive, and meet the keys of this member.
    for a in grid.columns:
        transfers.wait()
        row.arrive(a)
        row.meet(a, 0, k[:num_tokens], v[:num_tokens])

    # Column: the other keys of the column arrive, and meet all queries of the row. The own queries come last, so that
    # the results of the others travel meanwhile.
    for b in grid.steps:
        transfers.wait()
        held = grid.held(b, kv_buffers)
        for a in (*grid.columns, 0):
            row.meet(a, b, keys_of(held, k), values_of(held, v))

    out[:num_tokens] = row.own_result().to(out.dtype)
    return out, lse


class _ForwardRow:
    """The queries of a row on one member: by step of the row, a slice of queries and its running softmax."""

    def __init__(self, q: Tensor, value_width: int, grid: Grid, work: BlockWork) -> None:
        """``q [n, H, D]``: the own queries."""
        self.grid, self.work = grid, work
        wide, heads = lse_dtype(q.dtype), q.shape[1]
        self.messages = RowMessages(
            grid,
            q,
            queries=[(q.shape[1:], q.dtype)],
            results=[((heads, value_width), q.dtype), ((heads,), wide)],
            kinds=(Kind.FORWARD_QUERIES, Kind.FORWARD_RESULTS),
        )
        self.messages.fill(q)
        self.queries: list[Tensor] = []
        self.running: list[tuple[Tensor, Tensor]] = []

    def add(self, queries: Tensor, out: Tensor, lse: Tensor) -> None:
        """Begin with a slice of queries: the output in the dtype of sums, and the LSE, which are updated in place."""
        self.queries.append(queries)
        self.running.append((out, lse))

    def arrive(self, a: int) -> None:
        """Begin with the queries that arrived at step ``a``, which have met no key yet."""
        (queries,) = self.messages.arrived(a)
        own_out, own_lse = self.running[0]
        nothing = own_out.new_zeros(len(queries), *own_out.shape[1:])
        self.add(queries, nothing, own_lse.new_full((len(queries), own_lse.shape[1]), -torch.inf))

    def meet(self, a: int, b: int, keys: Tensor, values: Tensor) -> None:
        """Merge the result of the queries of step ``a`` and the keys of step ``b``. If it is complete, send it home."""
        for blocks in filter(None, self.grid.blocks[a, b]):
            part_out, part_lse = self.work.forward(self.queries[a], keys, values, blocks)
            merge_rows(*self.running[a], blocks.query_rows(part_out.device), part_out, part_lse)
        if a and b == self.grid.last_step:
            self.messages.send_home(a, *self.running[a])

    def own_result(self) -> Tensor:
        """Merge what comes home. Return the output of the own queries; their LSE has been updated in place."""
        out, lse = self.running[0]
        for part_out, part_lse in self.messages.own_results():
            merge_rows(out, lse, slice(0, len(out)), part_out, part_lse)
        return out


def grid_backward(
    dout: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    triangles: BlockSet,
    grid: Grid,
    work: BlockWork,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv`` of this rank's rows, from ``out``'s gradient, ``q, k, v`` and the results of ``grid_forward``."""
    (q, k, v), num_tokens = inputs, grid.num_tokens
    queries = OfQueries(dout, q, *results)
    wide = queries.lse.dtype
    kv_buffers, gradient_buffers = grid.kv_buffers(k, v), grid.gradient_buffers(k, v)
    pack(k[:num_tokens], v[:num_tokens], kv_buffers[0])
    row = _BackwardRow(OfQueries(*(rows[:num_tokens] for rows in queries)), grid, work)

    # Own: this rank's own triangles, while the first message travels.
    transfers = _in_turn(grid, row.messages, kv_buffers, Kind.BACKWARD_KV)
    dq, dk, dv = work.backward(queries, k, v, triangles)
    row.dq.append(dq[:num_tokens].to(wide))

    # Row: the other queries of the row arrive, and meet the keys of this member.
    of_own_keys = KeyGradients(grid, k, v, num_tokens)
    for a in grid.columns:
        transfers.wait()
        row.arrive(a)
        row.meet(a, 0, k[:num_tokens], v[:num_tokens], of_own_keys)

    # Column: compute this rank's share of the gradient of the keys that have arrived, and add it to the sum that
    # arrives one step behind them.
    gradient_transfer, returned = None, None
    for b in grid.steps:
        transfers.wait()
        held, collected = grid.held(b, kv_buffers), grid.held(b, gradient_buffers)
        share = KeyGradients(grid, k, v, len(held))
        for a in (*grid.columns, 0):
            row.meet(a, b, keys_of(held, k), values_of(held, v), share)
        # The sum of the members before us has travelled while we computed.
        if gradient_transfer is None:
            collected.zero_()
        else:
            gradient_transfer.wait()
        share.add_to(keys_of(collected, k), values=False)
        share.add_to(values_of(collected, v), values=True)
        del share  # frees its memory before the next step computes its own
        # Pass the sum on. The sum that arrives belongs to the keys of the next step; after the last, to our own keys.
        returned = grid.held(b + 1, gradient_buffers)
        gradient_transfer = grid.around_column(collected, returned, Kind.BACKWARD_GRADIENTS)

    if gradient_transfer is not None:
        gradient_transfer.wait()
    # One after the other, so that sums of keys and of values do not exist at the same time.
    for gradient, part_of in ((dk, keys_of), (dv, values_of)):
        total = gradient[:num_tokens].to(wide)
        of_own_keys.add_to(total, values=gradient is dv)
        if returned is not None:
            total += part_of(returned, gradient)
        gradient[:num_tokens] = total.to(gradient.dtype)
    dq[:num_tokens] = row.own_gradient().to(dq.dtype)
    return dq, dk, dv


class _BackwardRow:
    """The queries of a row on one member: by step of the row, ``(dout, q, out, lse)`` of a slice and its ``dq``."""

    def __init__(self, own: OfQueries, grid: Grid, work: BlockWork) -> None:
        self.grid, self.work = grid, work
        self.of_queries, self.dq = [own], list[Tensor]()
        dout, q, out, lse = own
        wide = lse.dtype
        self.messages = RowMessages(
            grid,
            q,
            queries=[
                (dout.shape[1:], dout.dtype),
                (q.shape[1:], q.dtype),
                (lse.shape[1:], wide),
                (lse.shape[1:], wide),
            ],
            results=[(q.shape[1:], wide)],
            kinds=(Kind.BACKWARD_QUERIES, Kind.BACKWARD_RESULTS),
        )
        if grid.columns:
            self.messages.fill(dout, q, lse, (dout.to(wide) * out.to(wide)).sum(dim=-1))

    def arrive(self, a: int) -> None:
        """Begin with the queries that arrived at step ``a``."""
        dout, q, lse, delta = self.messages.arrived(a)
        self.of_queries.append(OfQueries(dout, q, _equivalent_output(dout, delta), lse))
        self.dq.append(torch.zeros_like(q, dtype=lse.dtype))

    def meet(self, a: int, b: int, keys: Tensor, values: Tensor, share: KeyGradients) -> None:
        """Add the gradients of the queries of step ``a`` and the keys of step ``b``.

        The gradient of the keys joins ``share``. If that of the queries is complete, it is sent home.
        """
        for blocks in filter(None, self.grid.blocks[a, b]):
            dq, dk, dv = self.work.backward(self.of_queries[a], keys, values, blocks)
            add_rows(self.dq[a], blocks.query_rows(dq.device), dq)
            share.add(blocks.key_rows(dk.device), dk, dv)
        if a and b == self.grid.last_step:
            self.messages.send_home(a, self.dq[a])

    def own_gradient(self) -> Tensor:
        """Add what comes home to the gradient of the own queries, and return it."""
        for (part,) in self.messages.own_results():
            self.dq[0] += part
        return self.dq[0]


def _in_turn(grid: Grid, row: RowMessages, kv_buffers: Sequence[Tensor], kind: Kind) -> InTurn:
    """Start the transfers of a call: queries along the row, then keys and values around the column."""
    return InTurn(
        [
            *(partial(row.start, a) for a in grid.columns),
            *(partial(grid.start_kv, b, kv_buffers, kind) for b in grid.steps),
        ]
    )


class KeyGradients:
    """This member's share of the gradient of the keys that it holds, with a part from every column's queries.

    With one column and without trees there is at most one part, and it is kept as it is. Several parts are added up, in
    the dtype of sums.
    """

    def __init__(self, grid: Grid, k: Tensor, v: Tensor, num_tokens: int) -> None:
        self._part: tuple[Rows, Tensor, Tensor] | None = None
        self._sums: tuple[Tensor, Tensor] | None = None
        if grid.columns or any(len(blocks) > 1 for blocks in grid.blocks.values()):
            wide = lse_dtype(k.dtype)
            self._sums = (
                k.new_zeros(num_tokens, *k.shape[1:], dtype=wide),
                v.new_zeros(num_tokens, *v.shape[1:], dtype=wide),
            )

    def add(self, rows: Rows, dk: Tensor, dv: Tensor) -> None:
        """Add a part: the gradients of the keys and values in some ``rows``."""
        if self._sums is None:
            self._part = rows, dk, dv
        else:
            add_rows(self._sums[0], rows, dk)
            add_rows(self._sums[1], rows, dv)

    def add_to(self, total: Tensor, *, values: bool) -> None:
        """Add the share to a sum in place: to that of the values ``[n, G, Dv]``, or of the keys ``[n, G, D]``."""
        part = self._part if self._sums is None else (slice(None), *self._sums)
        if part is not None:
            add_rows(total, part[0], part[2] if values else part[1])


def _equivalent_output(dout: Tensor, delta: Tensor) -> Tensor:
    """Return an output ``[n, H, Dv]`` whose product with ``dout [n, H, Dv]``, summed over Dv, is ``delta [n, H]``.

    Kernels use the output for delta alone. Of all outputs with it, this is the shortest, a multiple of ``dout``:
    its rounding changes delta by less than the true output's. Rows are scaled, so that no square underflows.
    """
    wide = dout.to(delta.dtype)
    largest = wide.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)
    unit = wide / largest
    squares = unit.square().sum(dim=-1, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)
    return (unit * (delta[..., None] / largest / squares)).to(dout.dtype)
