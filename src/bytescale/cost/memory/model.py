"""The memory of our own models, counted from their shape.

A micro-batch needs memory on top of states and saved activations. The largest of its phases decides::

    loss       gradients of hidden states and of the head, one chunk of logits
    layer      backward of one layer's feed-forward part (after the layer was recomputed, with checkpointing)
    attention  backward of CUDA's flash attention, which sums in fp32 (``KernelMemory.fused_attention``)
    ring       backward of attention over a shared group: a block's gradients, sums in fp32

A micro-batch with a shared group has buffers of messages (``attention.rings.messages``) in all phases but the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from bytescale.config.architecture import Architecture
from bytescale.config.schema import Config
from bytescale.config.validate import may_offload
from bytescale.cost import flops
from bytescale.cost.memory.device_kernels import DeviceKind, KernelMemory, nccl_reserve_bytes
from bytescale.cost.memory.device_memory import DeviceMemory, States
from bytescale.cost.memory.measured import MeasuredMemory
from bytescale.cost.memory.rows import Checkpointing, ModelShare, RingWidths, RowBytes
from bytescale.cost.offload_rule import OffloadRule
from bytescale.cost.profile import Profile
from bytescale.cost.stage import movable_layers
from bytescale.plan.limits import Phase

_ABOUT_AS_MANY = 0.95  # each group more costs a pass over a layer's input; it should be worth it


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel(DeviceMemory):
    """The memory of one device. By default, a rank is one device that holds the whole model. All results are in bytes.

    A pipeline stage holds what layers save for all micro-batches in flight, each of which is taken to be as large as
    the one that is asked about.
    """

    share: ModelShare
    element_bytes: int
    """2 for bf16, 4 for fp32, 8 for fp64. Sums are in fp32 or wider."""
    num_ranks: int
    """HDP ranks, over which the optimizer's states are sharded."""
    kernels: KernelMemory = field(default_factory=KernelMemory)
    checkpointing: Checkpointing = "none"
    domain: int = 1
    """HDP ranks that share weights."""
    experts_in_parallel: bool = False
    """Whether they have whole experts, to which tokens travel: this counts as many as come if all are chosen alike."""
    head_groups: int = 1
    """Groups of heads that attention and its projections take one after the other, under checkpointing."""
    optimizer_on_host: bool = False
    nccl_bytes: int = 0
    """What NCCL holds beside everything that is counted here."""

    @staticmethod
    def on_device(
        share: ModelShare,
        kind: DeviceKind,
        *,
        element_bytes: int,
        num_ranks: int,
        checkpointing: Checkpointing = "none",
        attention: str = "auto",
    ) -> MemoryModel:
        """Return the model of a device of this ``kind`` that works as ``runtime`` does: same kernels, same chunks.

        It has one group of heads.
        """
        tensor_parallel = share.tensor_parallel
        return MemoryModel(
            share=share,
            element_bytes=element_bytes,
            num_ranks=num_ranks,
            kernels=KernelMemory.of_device(
                kind,
                share.architecture,
                element_bytes=element_bytes,
                tensor_parallel=tensor_parallel,
                attention=attention,
            ),
            checkpointing=checkpointing,
            nccl_bytes=nccl_reserve_bytes(num_ranks, tensor_parallel, share.num_stages) if kind == "cuda" else 0,
        )

    @staticmethod
    def of_config(
        config: Config,
        counted: Architecture | MeasuredMemory,
        kind: DeviceKind,
        *,
        element_bytes: int,
        num_ranks: int,
        device_bytes: float,
        domain: int = 1,
    ) -> DeviceMemory:
        """Return the memory of a run, in as many groups of heads as ``config`` says or as ``device_bytes`` need.

        ``counted``: the shape of the model; or its memory, if that was measured, which is returned. ``domain``: HDP
        ranks that share weights.
        """
        in_parallel = config.parallel.experts == "parallel" and domain > 1
        if isinstance(counted, MeasuredMemory):
            on_host = config.optimizer.offload
            return counted.with_states(domain=domain, experts_in_parallel=in_parallel, on_host=on_host)
        parallel = config.parallel
        whole = MemoryModel.on_device(
            ModelShare(architecture=counted, tensor_parallel=parallel.tp, num_stages=parallel.pp),
            kind,
            element_bytes=element_bytes,
            num_ranks=num_ranks,
            checkpointing=config.memory.checkpointing,
            attention=config.kernels.attention,
        )
        whole = replace(
            whole, domain=domain, experts_in_parallel=in_parallel, optimizer_on_host=config.optimizer.offload
        )
        tokens = parallel.capacity_tokens or None
        return whole.in_head_groups(device_bytes, capacity_tokens=tokens, offload=may_offload(config, kind))

    def in_head_groups(self, device_bytes: float, *, capacity_tokens: int | None, offload: bool) -> MemoryModel:
        """Return a copy that uses the fewest groups of heads with which ``capacity_tokens`` fit on every stage.

        If ``capacity_tokens`` is None, the copy has the fewest groups with which about as many tokens fit as with any
        number of groups; with ``offload``, tokens are then offloaded as far as possible. Where no number of groups
        suffices, the copy has the most.
        """
        most = self.most_head_groups
        choices = [replace(self, head_groups=groups) for groups in range(1, most + 1) if most % groups == 0]
        moved_share = float(offload and capacity_tokens is None)
        fitting = [min(stage.capacity_tokens(device_bytes, moved_share) for stage in m.stages()) for m in choices]
        wanted = _ABOUT_AS_MANY * max(fitting) if capacity_tokens is None else capacity_tokens
        return next((m for m, fits in zip(choices, fitting, strict=True) if fits >= wanted), choices[-1])

    @property
    def most_head_groups(self) -> int:
        """The largest number of groups: one key/value head of this device in each. Without checkpointing it is 1."""
        return 1 if self.checkpointing == "none" else self.share.key_heads

    def stages(self) -> list[MemoryModel]:
        """Return the same for every stage of the pipeline."""
        return [replace(self, share=replace(self.share, stage=stage)) for stage in range(self.share.num_stages)]

    def fullest_stage(self, device_bytes: float) -> MemoryModel:
        """Return the same for the stage that has room for the fewest tokens, and the first of several such stages."""
        return min(self.stages(), key=lambda stage: stage.capacity_tokens(device_bytes))

    @property
    def states(self) -> States:
        shape, parts = self.share.architecture, self.share.tensor_parallel
        layer = flops.layer_parameters(shape, tensor_parallel=parts)
        if parts > 1:  # norms and routers, which tensor-parallel ranks hold alike, are not shared
            layer -= (2 + shape.num_experts) * shape.hidden_size
        words = flops.head_parameters(shape) // parts
        ends = (0, 0, words) if shape.tie_embeddings else (words, words, 0)
        units = (ends[0], *(layer,) * self.share.num_layers, *ends[1:])
        experts = 3 * shape.num_experts * shape.ffn_hidden_size * shape.hidden_size // parts
        return States(
            num_parameters=self.share.num_parameters,
            element_bytes=self.element_bytes,
            num_ranks=self.num_ranks,
            domain=self.domain,
            trained_of_units=units,
            frozen_of_units=(0,) * len(units),
            trained_experts=(0, *(experts,) * self.share.num_layers, *(0 for _ in ends[1:])),
            experts_in_parallel=self.experts_in_parallel,
            on_host=self.optimizer_on_host,
        )

    @property
    def layer_saved_bytes_per_token(self) -> int:
        return self.rows.kept

    @property
    def saved_bytes_per_token(self) -> int:
        """What all layers, the final norm and the rotary angles keep of a token, of all micro-batches in flight."""
        rows = self.rows
        return self.share.num_in_flight * (self.share.num_layers * rows.kept + rows.beside_layers)

    @property
    def movable_bytes_per_token(self) -> int:
        """The part of it that may wait in host memory: what all layers but the last ones keep."""
        return self.share.num_in_flight * movable_layers(self.share.num_layers) * self.rows.kept

    def offload_rule(self, times: Profile, host_bytes: float) -> OffloadRule:
        return OffloadRule.of_layers(
            times,
            self.layer_saved_bytes_per_token,
            num_layers=self.share.num_layers,
            movable_share=self.limits().movable_share,
            host_bytes=host_bytes / self.share.num_in_flight,
        )

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
