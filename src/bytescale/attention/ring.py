"""Attention of one micro-batch: the causal triangles that a rank holds, then a ring over the shared group's members.

The ring (paper section 7; DistAttention and zig-zag ring attention before it), for member ``i`` of ``N``:

  step 0      own queries x own keys: causal triangles of the slices and of all local sequences, in one call
  step t      the keys of member j = i - t (mod N) have arrived; blocks that causality allows (``blocks.ring_blocks``)
              are folded into the running softmax; meanwhile the next keys are on their way

Backward runs the same ring of keys and values again, and behind it a ring of their gradients: member j's gradient
starts at j + 1, collects every member's share one step behind the keys, and comes home after N - 1 hops. Output and
LSE are those of the merged softmax, hence each block's gradient is exact alone.

Bytes that one member sends per layer, with K/V slices of ``n_j`` rows and ``b`` bytes a row (K and V together):
forward ``b * (sum of n_j, j != next member)``, backward the same plus the gradients in their own dtype
(``RingBuffers``).

Two buffers for keys and values and two for gradients are all that a ring needs, whatever the number of members: while
one is sent the other receives. Every transfer is waited for before its ring returns, hence the next layer may use the
same four. Under gloo that wait ends when both directions are done. Under NCCL it orders the compute stream behind the
transfer; whatever writes to a buffer later, a kernel or another communicator's operation, comes behind that stream.

Shape letters: T rows of the micro-batch, the first of which are the ``n_i`` shared ones; H query heads, G key/value
heads, D head width, N members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bytescale.attention.blocks import BlockSet, causal_triangles, ring_blocks
from bytescale.attention.compiled import CompiledMerges
from bytescale.attention.exchange import Exchange, Transfer
from bytescale.attention.kernels import AttentionKernel, add_rows, lse_dtype, merge_rows
from bytescale.plan import MicroBatch, SharedGroup

# Messages of one slice group that may be under way between the same two ranks at the same time get different tags.
_FORWARD_KV, _BACKWARD_KV, _BACKWARD_GRADIENTS = range(3)
_TAGS_PER_GROUP = 4


class AttentionMemory(Protocol):
    """Results of attention that outlive a layer which is computed again in backward (activation checkpointing)."""

    def recall(self) -> tuple[Tensor, Tensor] | None:
        """``out [T, H, D]`` and ``lse [T, H]`` of the same call before, or None when it has to be computed."""
        ...

    def keep(self, out: Tensor, lse: Tensor) -> None:
        """What was computed."""
        ...


class PackedAttention:
    """The attention callable that a model is given for one micro-batch on one rank.

    ``attention(q, k, v)`` with ``q [T, H, D]`` and ``k, v [T, G, D]``, rows in the micro-batch's layout
    (``plan.rank_plan``), returns ``[T, H, D]``. Every member of a shared group has to call it equally often, and with
    the same heads. Who works on some heads at a time and keeps results himself calls ``forward`` and ``backward``.
    """

    def __init__(
        self,
        micro_batch: MicroBatch,
        kernel: AttentionKernel,
        exchange: Exchange,
        memory: AttentionMemory | None = None,
        buffers: RingBuffers | None = None,
    ) -> None:
        """``buffers``: of the messages, which several micro-batches of one rank may use one after the other."""
        shared = micro_batch.shared
        self.kernel = kernel
        self.merge_rows = kernel.merge_rows if isinstance(kernel, CompiledMerges) else merge_rows
        self.memory = memory
        self.num_tokens = micro_batch.num_tokens
        self.num_shared_tokens = micro_batch.num_shared_tokens
        slices = [] if shared is None else (shared.chunks[0] + shared.chunks[1])[:, shared.member].tolist()
        self.triangles = causal_triangles(slices + micro_batch.local_lengths.tolist())
        self.ring = None if shared is None else Ring(shared, exchange, buffers or RingBuffers())

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[0] != self.num_tokens:
            raise ValueError(
                f"attention got {q.shape[0]} rows but its micro-batch has {self.num_tokens}: "
                "the model must keep one row per token, in order"
            )
        return _PackedAttentionFunction.apply(q, k, v, self)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``out [T, H, D]`` and ``lse [T, H]``, outside of autograd."""
        scale = q.shape[-1] ** -0.5
        if self.ring is None:
            return self.kernel.forward(q, k, v, self.triangles, scale)
        return _ring_forward(q, k, v, self, self.ring, scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of ``q``, ``k`` and ``v``, given that of ``out`` and what ``forward`` returned."""
        scale = q.shape[-1] ** -0.5
        if self.ring is None:
            return self.kernel.backward(dout, q, k, v, out, lse, self.triangles, scale)
        return _ring_backward(dout, q, k, v, out, lse, self, self.ring, scale)

    def remembered(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Output and LSE of all heads: those of the same call before where they are remembered, else ``compute()``."""
        known = None if self.memory is None else self.memory.recall()
        if known is not None:
            return known
        out, lse = compute()
        if self.memory is not None:
            self.memory.keep(out, lse)
        return out, lse


class RingBuffers:
    """Room for the messages of rings, allocated by the first ring that needs it and used by all that follow.

    Whoever runs micro-batches calls ``release`` behind each one's forward and backward, so that the room is free for
    what has no ring (the loss, another micro-batch).
    """

    def __init__(self, gradient_dtype: torch.dtype | None = None) -> None:
        """``gradient_dtype``: in which gradients travel; None: that of sums, fp32 (fp64 for fp64).

        A narrower one is rounded to at every member: its share is added in the wider of both dtypes.
        """
        self.gradient_dtype = gradient_dtype
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def pair(self, what: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two contiguous tensors of a shape and dtype, on the device of ``like``: the same ones for the same ``what``.

        What they hold is undefined.
        """
        size = math.prod(shape)
        pair = self._pairs.get(what)
        if pair is None or pair[0].numel() < size or (pair[0].dtype, pair[0].device) != (dtype, like.device):
            pair = self._pairs[what] = like.new_empty(size, dtype=dtype), like.new_empty(size, dtype=dtype)
        return pair[0][:size].view(*shape), pair[1][:size].view(*shape)

    def release(self) -> None:
        """Give the memory back to the allocator. The next ring allocates again."""
        self._pairs.clear()


class Ring:
    """One member's place in a shared group: who is next, what arrives at each step, which blocks it allows."""

    def __init__(self, shared: SharedGroup, exchange: Exchange, buffers: RingBuffers) -> None:
        self.exchange = exchange
        self.buffers = buffers
        self.size = shared.size
        self.member = shared.member
        self.next_rank = shared.ranks[(shared.member + 1) % shared.size]
        self.previous_rank = shared.ranks[(shared.member - 1) % shared.size]
        self.rows_per_member: list[int] = shared.tokens_per_member.tolist()
        self.first_tag = shared.group * _TAGS_PER_GROUP
        self.blocks: dict[int, BlockSet] = {
            source: ring_blocks(shared.chunks, shared.member, source)
            for source in range(shared.size)
            if source != shared.member
        }

    def source(self, step: int) -> int:
        """The member whose keys are here at a step."""
        return (self.member - step) % self.size

    def start_kv(self, step: int, held: Tensor, buffer: Tensor, kind: int) -> tuple[Transfer, Tensor]:
        """Pass on the keys and values held at ``step``; returns the transfer and the rows that it will have filled."""
        arriving = _rows(buffer, self.rows_per_member[self.source(step + 1)])
        transfer = self.exchange.start(
            send=held, to=self.next_rank, receive=arriving, source=self.previous_rank, tag=self.first_tag + kind
        )
        return transfer, arriving

    def start_gradients(self, send: Tensor | None, receive: Tensor | None) -> Transfer:
        """Send the gradients of the keys that were here, receive those of the keys that come next."""
        return self.exchange.start(
            send=send,
            to=self.next_rank,
            receive=receive,
            source=self.previous_rank,
            tag=self.first_tag + _BACKWARD_GRADIENTS,
        )

    def kv_buffers(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Room for two messages of K and V, ``[n, 2, G, D]`` with as many rows as any member's slice has."""
        return self.buffers.pair("kv", k, self._shape(k), k.dtype)

    def gradient_buffers(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Room for two messages of their gradients, of the same shape."""
        return self.buffers.pair("gradients", k, self._shape(k), self.buffers.gradient_dtype or lse_dtype(k.dtype))

    def _shape(self, k: Tensor) -> tuple[int, ...]:
        return max(self.rows_per_member), 2, *k.shape[1:]


class _PackedAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: PackedAttention) -> Tensor:
        out, lse = attention.remembered(lambda: attention.forward(q, k, v))
        ctx.attention = attention
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = ctx.attention.backward(gradients[0], q, k, v, out, lse)
        return dq, dk, dv, None


def _ring_forward(
    q: Tensor, k: Tensor, v: Tensor, attention: PackedAttention, ring: Ring, scale: float
) -> tuple[Tensor, Tensor]:
    shared = attention.num_shared_tokens
    buffers = ring.kv_buffers(k)
    held = _pack(k[:shared], v[:shared], buffers[0])

    # Step 0: everything that this rank can compute alone, while the first keys travel.
    transfer, arriving = ring.start_kv(0, held, buffers[1], _FORWARD_KV)
    out, lse = attention.kernel.forward(q, k, v, attention.triangles, scale)
    running_out, running_lse = out[:shared].to(lse.dtype), lse[:shared]

    # Steps 1 .. N-1: fold in what has arrived, while the next keys travel.
    for step in range(1, ring.size):
        transfer.wait()
        held = arriving
        if step < ring.size - 1:
            # Into the buffer that the step before has read and sent.
            transfer, arriving = ring.start_kv(step, held, buffers[(step + 1) % 2], _FORWARD_KV)
        blocks = ring.blocks[ring.source(step)]
        if blocks:
            part_out, part_lse = attention.kernel.forward(q[:shared], held[:, 0], held[:, 1], blocks, scale)
            attention.merge_rows(running_out, running_lse, blocks.query_rows(q.device), part_out, part_lse)

    out[:shared] = running_out.to(out.dtype)
    return out, lse


def _ring_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    attention: PackedAttention,
    ring: Ring,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    shared, kernel = attention.num_shared_tokens, attention.kernel
    wide = lse_dtype(q.dtype)
    kv_buffers, gradient_buffers = ring.kv_buffers(k), ring.gradient_buffers(k)
    held = _pack(k[:shared], v[:shared], kv_buffers[0])
    shared_inputs = (q[:shared], out[:shared], lse[:shared], dout[:shared])

    # Step 0: own triangles, while the first keys travel.
    transfer, arriving = ring.start_kv(0, held, kv_buffers[1], _BACKWARD_KV)
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, attention.triangles, scale)
    dq_shared = dq[:shared].to(wide)

    # Steps 1 .. N-1: this rank's share of the gradient of member j's keys, added to what came with them.
    gradient_transfer: Transfer | None = None
    for step in range(1, ring.size):
        transfer.wait()
        held = arriving
        if step < ring.size - 1:
            transfer, arriving = ring.start_kv(step, held, kv_buffers[(step + 1) % 2], _BACKWARD_KV)
        source = ring.source(step)
        blocks = ring.blocks[source]
        parts = _block_gradients(dq_shared, shared_inputs, held, blocks, kernel, scale) if blocks else None
        # What the members before us collected has travelled while we computed.
        collected = _rows(gradient_buffers[step % 2], ring.rows_per_member[source])
        if gradient_transfer is None:
            collected.zero_()
        else:
            gradient_transfer.wait()
        if parts is not None:
            rows = blocks.key_rows(q.device)
            add_rows(collected[:, 0], rows, parts[0])
            add_rows(collected[:, 1], rows, parts[1])
            parts = None  # their memory is free while the next step's are computed
        # Pass the sum on; what arrives meanwhile belongs to the keys of the next step (after the last: our own).
        arriving_rows = ring.rows_per_member[ring.source(step + 1)]
        coming = _rows(gradient_buffers[(step + 1) % 2], arriving_rows)
        gradient_transfer = ring.start_gradients(send=collected, receive=coming)

    if gradient_transfer is not None:
        gradient_transfer.wait()
        own = _rows(gradient_buffers[ring.size % 2], shared)
        dk[:shared] = (dk[:shared].to(wide) + own[:, 0]).to(dk.dtype)
        dv[:shared] = (dv[:shared].to(wide) + own[:, 1]).to(dv.dtype)
    dq[:shared] = dq_shared.to(dq.dtype)
    return dq, dk, dv


def _block_gradients(
    dq_shared: Tensor,
    shared_inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    held: Tensor,
    blocks: BlockSet,
    kernel: AttentionKernel,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Add the blocks' gradient of queries to ``dq_shared [n, H, D]``; return those of their keys and values."""
    q, out, lse, dout = shared_inputs
    part_dq, part_dk, part_dv = kernel.backward(dout, q, held[:, 0], held[:, 1], out, lse, blocks, scale)
    add_rows(dq_shared, blocks.query_rows(q.device), part_dq)
    return part_dk, part_dv


def _pack(k: Tensor, v: Tensor, buffer: Tensor) -> Tensor:
    """Copy ``k, v [n, G, D]`` into the first rows of a message buffer ``[N, 2, G, D]``."""
    rows = _rows(buffer, k.shape[0])
    rows[:, 0], rows[:, 1] = k, v
    return rows


def _rows(buffer: Tensor, count: int) -> Tensor:
    """The first ``count`` rows of a message buffer: contiguous, as sends and receives need."""
    return buffer[:count]
