"""Attention of a slice group's sequences: a ring of keys and values over its members.

A shared group is a set of ranks, its members, that hold slices of the same sequences. The ring comes from section 7 of
the paper; DistAttention and zig-zag ring attention came before it. Member ``i`` of ``N`` runs these steps:

  step 0      It computes its own queries against its own keys: the causal triangles of its slices and of all its local
              sequences, in one call.
  step t      The keys of member j = i - t (mod N) have arrived. The member computes the blocks that causality allows
              (``blocks.ring_blocks``) and merges them into the running softmax. Meanwhile the next keys travel.

Backward runs the same ring of keys and values again. A second ring, one step behind it, carries their gradients: the
gradient of member j's keys starts at member j + 1, every member adds its share, and the sum reaches member j after
N - 1 hops. Backward uses the output and LSE of the whole, merged softmax, so the gradient of each block is exact on its
own.

Bytes that one member sends per layer, where ``n_j`` is the number of rows of member j's slice and ``b`` the bytes of a
row (K and V together): forward sends ``b * (sum of n_j, j != next member)``. Backward sends the same, and the gradients
in their own dtype (``RingBuffers``).

A ring needs two buffers for keys and values and two for gradients, whatever the number of members: one is sent while
the other receives. The ring waits for every transfer before it returns, so the next layer may use the same four
buffers. Under gloo the wait ends when both directions are complete. Under NCCL the wait makes the compute stream wait
for the transfer. Whatever writes to a buffer later, be it a kernel or an operation of another communicator, is ordered
after that stream.

Shape letters: T rows of the micro-batch, of which the first ``n_i`` are shared; H query heads, G key/value heads,
D head width, N members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bytescale.attention.blocks import BlockSet, Rows, ring_blocks
from bytescale.attention.exchange import Exchange, Transfer
from bytescale.attention.kernels import AttentionKernel, add_rows, lse_dtype
from bytescale.plan import SharedGroup

# Two messages of one shared group can travel between the same two ranks at the same time. Their tags differ.
FORWARD_KV, BACKWARD_KV, BACKWARD_GRADIENTS = range(3)
_TAGS_PER_GROUP = 4


MergeRows = Callable[[Tensor, Tensor, Rows, Tensor, Tensor], None]


@dataclass(frozen=True)
class BlockWork:
    """How one call of attention computes blocks: the kernel, the scale, and how partial results are merged."""

    kernel: AttentionKernel
    scale: float
    merge_rows: MergeRows

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockSet) -> tuple[Tensor, Tensor]:
        """``AttentionKernel.forward``."""
        return self.kernel.forward(q, k, v, blocks, self.scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: BlockSet
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``AttentionKernel.backward``."""
        return self.kernel.backward(dout, q, k, v, out, lse, blocks, self.scale)


class RingBuffers:
    """Buffers for the messages of rings. The first ring that needs them allocates them; the following rings reuse them.

    The code that runs micro-batches calls ``release`` after the forward and after the backward of each micro-batch.
    Then the memory is free for work without a ring, such as the loss or another micro-batch.
    """

    def __init__(self, gradient_dtype: torch.dtype | None = None) -> None:
        """``gradient_dtype``: the dtype of gradients in messages. None: the dtype of sums, fp32 (fp64 for fp64 inputs).

        With a narrower dtype, every member adds its share in the wider of the two dtypes and then rounds the sum.
        """
        self.gradient_dtype = gradient_dtype
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def pair(self, what: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return two contiguous tensors of this shape and dtype, on the device of ``like``.

        Calls with the same ``what`` share memory. The values in the tensors are undefined.
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
    """One member's place in a shared group: its neighbours, what arrives at each step, and which blocks to compute."""

    def __init__(self, shared: SharedGroup, exchange: Exchange, buffers: RingBuffers) -> None:
        self.exchange = exchange
        self.buffers = buffers
        self.size = shared.size
        self.member = shared.member
        self.ranks = shared.ranks
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
        """Return the member whose keys this member holds at ``step``."""
        return (self.member - step) % self.size

    def start_kv(self, step: int, held: Tensor, buffer: Tensor, kind: int) -> tuple[Transfer, Tensor]:
        """Pass on the keys and values held at ``step``. Return the transfer and the rows that it fills."""
        arriving = _rows(buffer, self.rows_per_member[self.source(step + 1)])
        transfer = self.exchange.start(
            send=held, to=self.next_rank, receive=arriving, source=self.previous_rank, tag=self.first_tag + kind
        )
        return transfer, arriving

    def start_gradients(self, send: Tensor | None, receive: Tensor | None) -> Transfer:
        """Send the gradients of the keys that were here, and receive the gradients of the keys that come next."""
        return self.exchange.start(
            send=send,
            to=self.next_rank,
            receive=receive,
            source=self.previous_rank,
            tag=self.first_tag + BACKWARD_GRADIENTS,
        )

    def kv_buffers(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return buffers for two messages of K and V, ``[n, G (D + Dv)]``; n is the longest slice of any member."""
        return self.buffers.pair("kv", k, self._shape(k, v), k.dtype)

    def gradient_buffers(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return buffers for two messages of the gradients of K and V, of the same shape."""
        dtype = self.buffers.gradient_dtype or lse_dtype(k.dtype)
        return self.buffers.pair("gradients", k, self._shape(k, v), dtype)

    @property
    def num_rows(self) -> int:
        """Number of rows of this member's slice."""
        return self.rows_per_member[self.member]

    def _shape(self, k: Tensor, v: Tensor) -> tuple[int, int]:
        return max(self.rows_per_member), message_width(k, v)


def message_width(k: Tensor, v: Tensor) -> int:
    """Numbers in a row of a message: all heads of K, then all heads of V."""
    return k.shape[1] * (k.shape[2] + v.shape[2])


def keys_of(message: Tensor, k: Tensor) -> Tensor:
    """The keys ``[n, G, D]`` in the rows of a message ``[n, G (D + Dv)]``, or their gradients; D and G are ``k``'s."""
    return message[:, : k.shape[1] * k.shape[2]].unflatten(1, k.shape[1:])


def values_of(message: Tensor, v: Tensor) -> Tensor:
    """The values ``[n, G, Dv]`` in the rows of a message, or their gradients."""
    return message[:, -v.shape[1] * v.shape[2] :].unflatten(1, v.shape[1:])


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, triangles: BlockSet, ring: Ring, work: BlockWork
) -> tuple[Tensor, Tensor]:
    """``out [T, H, Dv]`` and ``lse [T, H]``; ``triangles``: what this rank can compute alone."""
    shared = ring.num_rows
    buffers = ring.kv_buffers(k, v)
    held = _pack(k[:shared], v[:shared], buffers[0])

    # Step 0: everything that this rank can compute alone, while the first keys travel.
    transfer, arriving = ring.start_kv(0, held, buffers[1], FORWARD_KV)
    out, lse = work.forward(q, k, v, triangles)
    running_out, running_lse = out[:shared].to(lse.dtype), lse[:shared]

    # Steps 1 .. N-1: compute with the keys that have arrived and merge the result, while the next keys travel.
    for step in range(1, ring.size):
        transfer.wait()
        held = arriving
        if step < ring.size - 1:
            # The previous step has read and sent the other buffer, so the next keys may overwrite it.
            transfer, arriving = ring.start_kv(step, held, buffers[(step + 1) % 2], FORWARD_KV)
        blocks = ring.blocks[ring.source(step)]
        if blocks:
            part_out, part_lse = work.forward(q[:shared], keys_of(held, k), values_of(held, v), blocks)
            work.merge_rows(running_out, running_lse, blocks.query_rows(q.device), part_out, part_lse)

    out[:shared] = running_out.to(out.dtype)
    return out, lse


def ring_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    triangles: BlockSet,
    ring: Ring,
    work: BlockWork,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv`` of this rank's rows, from the gradient of ``out`` and what ``ring_forward`` returned."""
    shared = ring.num_rows
    wide = lse_dtype(q.dtype)
    kv_buffers, gradient_buffers = ring.kv_buffers(k, v), ring.gradient_buffers(k, v)
    held = _pack(k[:shared], v[:shared], kv_buffers[0])
    of_queries = (dout[:shared], q[:shared], out[:shared], lse[:shared])

    # Step 0: this rank's own triangles, while the first keys travel.
    transfer, arriving = ring.start_kv(0, held, kv_buffers[1], BACKWARD_KV)
    dq, dk, dv = work.backward(dout, q, k, v, out, lse, triangles)
    dq_shared = dq[:shared].to(wide)

    # Steps 1 .. N-1: compute this rank's share of the gradient of member j's keys, and add it to the sum received.
    gradient_transfer: Transfer | None = None
    for step in range(1, ring.size):
        transfer.wait()
        held = arriving
        if step < ring.size - 1:
            transfer, arriving = ring.start_kv(step, held, kv_buffers[(step + 1) % 2], BACKWARD_KV)
        source = ring.source(step)
        blocks = ring.blocks[source]
        keys_and_values = keys_of(held, k), values_of(held, v)
        parts = block_gradients(dq_shared, of_queries, *keys_and_values, blocks, work) if blocks else None
        # The sum of the members before us has travelled while we computed.
        collected = _rows(gradient_buffers[step % 2], ring.rows_per_member[source])
        if gradient_transfer is None:
            collected.zero_()
        else:
            gradient_transfer.wait()
        if parts is not None:
            rows = blocks.key_rows(q.device)
            add_rows(keys_of(collected, k), rows, parts[0])
            add_rows(values_of(collected, v), rows, parts[1])
            parts = None  # frees their memory before the next step computes its own
        # Pass the sum on. The sum that arrives belongs to the keys of the next step; after the last, to our own keys.
        arriving_rows = ring.rows_per_member[ring.source(step + 1)]
        coming = _rows(gradient_buffers[(step + 1) % 2], arriving_rows)
        gradient_transfer = ring.start_gradients(send=collected, receive=coming)

    if gradient_transfer is not None:
        gradient_transfer.wait()
        own = _rows(gradient_buffers[ring.size % 2], shared)
        dk[:shared] = (dk[:shared].to(wide) + keys_of(own, k)).to(dk.dtype)
        dv[:shared] = (dv[:shared].to(wide) + values_of(own, v)).to(dv.dtype)
    dq[:shared] = dq_shared.to(dq.dtype)
    return dq, dk, dv


def block_gradients(
    dq_shared: Tensor,
    of_queries: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    blocks: BlockSet,
    work: BlockWork,
) -> tuple[Tensor, Tensor]:
    """Add the blocks' query gradients to ``dq_shared [n, H, D]``. Return the gradients of their keys and values.

    ``of_queries``: ``dout, q, out, lse`` of the shared rows.
    """
    dout, q, out, lse = of_queries
    part_dq, part_dk, part_dv = work.backward(dout, q, k, v, out, lse, blocks)
    add_rows(dq_shared, blocks.query_rows(q.device), part_dq)
    return part_dk, part_dv


def _pack(k: Tensor, v: Tensor, buffer: Tensor) -> Tensor:
    """Copy ``k [n, G, D]`` and ``v [n, G, Dv]`` into the first rows of a message buffer ``[N, G (D + Dv)]``."""
    rows = _rows(buffer, k.shape[0])
    keys_of(rows, k).copy_(k)
    values_of(rows, v).copy_(v)
    return rows


def _rows(buffer: Tensor, count: int) -> Tensor:
    """Return the first ``count`` rows of a message buffer. They are contiguous, as sends and receives require."""
    return buffer[:count]
