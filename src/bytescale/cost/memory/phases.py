"""What a micro-batch needs on top of states and saved activations. The largest of its phases decides::

    loss       gradients of hidden states and of the head, one chunk of logits
    layer      backward of one layer's feed-forward part (after the layer was recomputed, with checkpointing)
    attention  backward of CUDA's flash attention, which sums in fp32 (``KernelMemory.fused_attention``)
    ring       backward of attention over a shared group: a block's gradients, sums in fp32

A micro-batch with a shared group has buffers of messages (``attention.rings.messages``) in all phases but the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from bytescale.cost import flops
from bytescale.cost.memory.device_kernels import KernelMemory
from bytescale.cost.memory.device_memory import DeviceMemory
from bytescale.cost.memory.rows import Checkpointing, ModelShare, RingWidths, RowBytes
from bytescale.plan.limits import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedMemory(DeviceMemory):
    """A device with layers of our own, and the phases of its micro-batches. All results are in bytes."""

    share: ModelShare
    element_bytes: int
    """2 for bf16, 4 for fp32, 8 for fp64. Sums are in fp32 or wider."""
    kernels: KernelMemory = field(default_factory=KernelMemory)
    checkpointing: Checkpointing = "none"
    domain: int = 1
    """HDP ranks that share weights."""
    experts_in_parallel: bool = False
    """Whether they have whole experts, to which tokens travel: this counts as many as come if all are chosen alike."""
    head_groups: int = 1
    """Groups of heads that attention and its projections take one after the other, under checkpointing."""

    @property
    def rows(self) -> RowBytes:
        return RowBytes.of(self.share, self.kernels, element_bytes=self.element_bytes, checkpointing=self.checkpointing)

    def phases(self) -> tuple[Phase, ...]:
        loss = (self._loss(),) if self.share.is_last else ()
        return (*loss, self._feed_forward(), *self._attention())

    @property
    def _wide(self) -> int:
        return max(4, self.element_bytes)

    def _loss(self) -> Phase:
        shape, parts, wide = self.share.architecture, self.share.tensor_parallel, self._wide
        words, vocab_size = flops.head_parameters(shape) // parts, shape.vocab_size / parts
        # The head's gradient is summed in fp32 or wider: what is added of it at a time is a copy. Logits that are
        # converted themselves take more than that, and are gone by then.
        converted = min(words, self.kernels.head_chunk_numbers) if self.kernels.fused_loss else 0
        return Phase(
            name="loss",
            fixed_bytes=words * wide + converted * self.element_bytes,
            bytes_per_token=self.rows.hidden,
            chunk_tokens=self.kernels.loss_chunk_tokens,
            bytes_per_chunk_token=vocab_size * self.rows.logit + 2 * self.rows.hidden,
        )

    def _feed_forward(self) -> Phase:
        shape, parts, rows = self.share.architecture, self.share.tensor_parallel, self.rows
        # Of its gradients, as much as one of its tensors exists at a time.
        inner = max(1, shape.experts_per_token) * shape.ffn_hidden_size * self.element_bytes // parts
        # The largest gradient of a matrix. The experts' gradients come as one tensor.
        matrix = shape.ffn_hidden_size * shape.hidden_size * self.element_bytes // parts
        experts, chunk_rows, sent = max(1, shape.num_experts), self.kernels.feed_forward_rows, 0
        if self.experts_in_parallel:  # rows that leave and rows that come, all at once
            experts, chunk_rows = experts // self.domain, math.inf
            sent = 2 * shape.experts_per_token * rows.hidden
        phase = Phase(
            name="layer",
            fixed_bytes=experts * matrix,
            bytes_per_shared_token=self._ring_buffers_beside_feed_forward,
            bytes_per_grid_token=self._rings.own_message,
            bytes_per_row_token=self._rings.row_buffers,
            chunk_tokens=chunk_rows,
        )
        if self.checkpointing == "none":
            return replace(phase, chunk_tokens=math.inf, bytes_per_token=rows.hidden + inner + sent)
        # The recomputed first half, the second half's input, and the gradients of the second half's output and input.
        held = rows.first_half(self.head_groups) + 3 * rows.own_hidden - rows.final_norm
        chunk = rows.feed_forward_inner + inner + sent
        if parts == 1:
            chunk += rows.norm - rows.own_hidden + rows.feed_forward_input + rows.hidden
        else:  # the norm and the gathering are not part of the chunks, nor are the gathered gradients
            held += rows.norm - rows.own_hidden + 3 * rows.hidden
        return replace(phase, bytes_per_token=held, bytes_per_chunk_token=chunk)

    def _attention(self) -> tuple[Phase, ...]:
        """Backward of attention, alone and in a ring, with what its kernels allocate.

        CUDA's kernel is ``mha_varlen_bwd`` of ATen's flash_api.cpp. The CPU's returns gradients that are copied.
        """
        shape, parts, groups, rows = self.share.architecture, self.share.tensor_parallel, self.head_groups, self.rows
        query, kv = rows.query, 2 * rows.key
        if self.kernels.fused_attention:
            # Sums of dq, a number per row and head; where heads share keys, dk and dv of every query head.
            per_query_row = 4 * (shape.head_dim + 1) * shape.num_heads // parts
            per_key_row = 2 * query if shape.num_kv_heads < shape.num_heads else 0
        else:
            per_query_row, per_key_row = query, kv
        # The layer's second half is done, and so is the final norm. The residual stream's gradient exists.
        held = -rows.second_half if self.checkpointing == "none" else rows.first_half(groups)
        held += rows.own_hidden - rows.final_norm
        inside = 2 * query + kv  # gradients of the output, q, k and v
        if groups > 1:
            # One group's q, k and v, and its output, which CUDA's kernel copies out of all heads'. The gradient of what
            # the projections read and, where it is gathered, of the result.
            inside += query + kv + query * int(self.kernels.fused_attention)
            held += rows.hidden * (1 if parts == 1 else 2)
        # A ring has sums of the query gradients, where those are narrower. A block is of all queries and half of the
        # keys, or the other way round.
        buffers = self._rings.ring_buffers
        wide = self._wide / self.element_bytes
        sums = query * wide if wide > 1 else 0
        of_query, of_key = query + per_query_row, kv + per_key_row
        block = max(of_query + of_key / 2, of_query / 2 + of_key)
        return (
            Phase(
                name="attention",
                bytes_per_token=held + (inside + per_query_row + per_key_row) / groups,
                bytes_per_shared_token=buffers,
                bytes_per_grid_token=self._rings.own_message,
                bytes_per_row_token=self._rings.row_buffers,
            ),
            Phase(
                name="ring",
                bytes_per_token=held + inside / groups,
                bytes_per_shared_token=buffers + (sums + block) / groups,
                # Gradients of the own keys, and of those that are here, are summed over the row's queries.
                bytes_per_grid_token=self._rings.own_message + 2 * kv * wide / groups,
                # An output that has the same delta, and sums of the query gradients.
                bytes_per_row_token=self._rings.row_buffers + query * (1 + wide) / groups,
            ),
        )

    @property
    def _rings(self) -> RingWidths:
        """What a row of one group of heads takes in attention over a shared group."""
        query, keys, wide = self.rows.query / self.head_groups, 2 * self.rows.key / self.head_groups, self._wide
        return RingWidths(
            query=query,
            keys=keys,
            lse=query / (self.share.architecture.head_dim * self.element_bytes) * wide,
            wide=wide / self.element_bytes,
        )

    @property
    def _ring_buffers_beside_feed_forward(self) -> float:
        """The ring's buffers that exist in backward of a layer's feed-forward part.

        In the last layer only what its recomputation has allocated exists. Layers before it have all buffers, but the
        last layer's saved activations are gone by then.
        """
        recomputed = 4 * self.rows.key / self.head_groups if self.checkpointing == "full" else 0.0
        return max(recomputed, self._rings.ring_buffers - self.rows.kept)
