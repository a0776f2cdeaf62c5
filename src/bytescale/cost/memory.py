"""Peak memory of a micro-batch, part by part, from the model's shape: what fits is known before anything runs.

At any moment a rank holds its states (parameters, gradient sums, its shard of the optimizer) and what the layers have
saved for backward. On top of that comes one of these phases, and the largest decides::

    loss      gradients of hidden states and head, one chunk of logits
    layer     backward of one layer's feed-forward part (after computing the layer again, with checkpointing)
    attention backward of CUDA's flash attention, which sums in fp32 (``fused_attention``)
    ring      backward of attention over a shared group: a block's gradients, sums in fp32

A ring's four message buffers are allocated once and serve all layers of a micro-batch (``attention.ring``). A
micro-batch with a shared group has them in every phase but the loss.

Tensor parallelism over N devices leaves each 1 / N of heads, feed-forward and vocabulary, and 1 / N of the tokens of
the residual stream and norms; what matrices read is gathered, h a token on every device (``models.tensor_parallel``).
A stage s of p has its layers, the first the embedding, the last norm, head and loss; 1F1B keeps up to p - s
micro-batches in flight on it, each taken to be as large as the one that is asked about.

Counts follow what autograd really saves (tests/cost/test_memory.py holds them against counted tensors, phase by phase).
Letters: h hidden, f feed-forward, q and k widths of all query and of all key heads, e bytes per element, w bytes of
sums (fp32, fp64 for fp64), V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from bytescale.config import Architecture, RingGradients
from bytescale.cost import flops
from bytescale.cost.split import stage_chunks
from bytescale.plan.limits import MemoryLimits, Phase

Checkpointing = Literal["none", "full", "attention"]
DeviceKind = Literal["cpu", "cuda"]
RESIDENT_LAYERS = 2
NCCL_BYTES_PER_NEIGHBOUR = 32 * (10 + 2) * 2**20
"""Buffers that NCCL allocates beside PyTorch when two GPUs of a node first exchange messages, and about what a
communicator takes for collectives: 32 channels, 10 MiB each to receive and 2 MiB to send (as its log of allocations
shows on 8 H100s, NVIDIA/nccl#1685, where seven peers took 3.28 GB). Peers behind the network share one buffer."""
_GPUS_PER_NODE = 8
LOGITS_PER_CHUNK = {
    "cpu": 2**22,  # 16 MiB in fp32, which fits the last-level cache of a server
    "cuda": 2**28,  # 512 MiB in BF16: summing the head's gradient costs 10 bytes of traffic per weight and chunk
}
"""Logits that exist at a time."""
HEAD_NUMBERS_PER_CHUNK = {"cpu": 2**22, "cuda": 2**26}
"""Numbers of the head's gradient that are converted between its sum's dtype and the weights' at a time."""
ROWS_PER_CHUNK = {"cpu": 2**15, "cuda": 2**15}
"""Rows of a feed-forward block that are computed again at a time, with checkpointing: 3.8 GB of a 7B model in BF16."""
_ABOUT_AS_MANY = 0.95  # each group more costs a pass over a layer's input; it should be worth it
_INPUT_BYTES_PER_TOKEN = 3 * 8  # token, label and position, int64


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """One device of a stage of a rank; by default the rank is one device. All results in bytes."""

    architecture: Architecture
    element_bytes: int
    """2: bf16, 4: fp32, 8: fp64."""
    num_ranks: int
    """Over which the optimizer's states are sharded."""
    checkpointing: Checkpointing = "none"
    fused_norm: bool = True
    """Whether RMSNorm is one kernel (CUDA), which saves neither the normalised rows nor copies in fp32."""
    nccl_bytes: int = 0
    """What NCCL holds beside everything that is counted here."""
    ring_gradients: RingGradients = "wide"
    """In what the gradients of keys and values travel around a ring."""
    fused_attention: bool = False
    """Whether attention is CUDA's flash kernel, whose backward has its gradients and fp32 sums beside them at once."""
    loss_chunk_tokens: int = 1024
    """Tokens whose logits exist at a time."""
    head_chunk_numbers: float = math.inf
    """Numbers of the head's gradient that are converted at a time."""
    fused_loss: bool = False
    """Whether logits stay in the compute dtype (the Triton kernel for BF16)."""
    feed_forward_rows: float = math.inf
    """Rows of the feed-forward part that exist at a time in backward, under checkpointing (which see, in runtime)."""
    head_groups: int = 1
    """Groups of heads that attention and its projections take one after the other, under checkpointing."""
    tensor_parallel: int = 1
    num_stages: int = 1
    stage: int = 0
    """Which of them this is."""
    virtual_stages: int = 1
    """Chunks of layers on each, interleaved (``plan.schedule``)."""

    @staticmethod
    def on_device(
        architecture: Architecture,
        kind: DeviceKind,
        *,
        element_bytes: int,
        num_ranks: int,
        checkpointing: Checkpointing = "none",
        attention: str = "auto",
        head_groups: int = 1,
        tensor_parallel: int = 1,
        num_stages: int = 1,
        virtual_stages: int = 1,
        ring_gradients: RingGradients = "wide",
    ) -> MemoryModel:
        """As ``runtime`` works on a device of this ``kind``: with its kernels, and chunk by chunk what it does so."""
        on_gpu = kind == "cuda"
        return MemoryModel(
            architecture=architecture,
            element_bytes=element_bytes,
            num_ranks=num_ranks,
            checkpointing=checkpointing,
            fused_norm=on_gpu,
            fused_attention=on_gpu and attention != "math",
            loss_chunk_tokens=loss_chunk_tokens(-(-architecture.vocab_size // tensor_parallel), kind),
            head_chunk_numbers=HEAD_NUMBERS_PER_CHUNK[kind],
            fused_loss=on_gpu and element_bytes == 2,
            feed_forward_rows=ROWS_PER_CHUNK[kind] if is_row_wise(architecture, tensor_parallel) else math.inf,
            head_groups=head_groups,
            tensor_parallel=tensor_parallel,
            num_stages=num_stages,
            virtual_stages=virtual_stages,
            ring_gradients=ring_gradients,
            nccl_bytes=nccl_reserve_bytes(num_ranks, tensor_parallel, num_stages) if on_gpu else 0,
        )

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
        return 1 if self.checkpointing == "none" else self.architecture.num_kv_heads // self._kv_parts

    def stages(self) -> list[MemoryModel]:
        """The same for every stage of the pipeline."""
        return [replace(self, stage=stage) for stage in range(self.num_stages)]

    def fullest_stage(self, device_bytes: float) -> MemoryModel:
        """The same for the stage that has room for the fewest tokens; of equals the first."""
        return min(self.stages(), key=lambda stage: stage.capacity_tokens(device_bytes))

    @property
    def num_layers(self) -> int:
        """Of this stage."""
        return sum(map(len, self._chunks))

    @property
    def _chunks(self) -> list[range]:
        return stage_chunks(self.architecture, self.num_stages, self.stage, self.virtual_stages)

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose activations are here at the same time; interleaved: as many as make up their chunks."""
        behind = self.num_stages - 1 - self.stage
        if self.virtual_stages == 1:
            return behind + 1
        chunks = 2 * behind + (self.virtual_stages - 1) * self.num_stages + 1
        return -(-chunks // self.virtual_stages)

    @property
    def num_parameters(self) -> int:
        """Weights on this device."""
        shape, parts = self.architecture, self.tensor_parallel
        words = -(-flops.head_parameters(shape) // parts)
        matrices = int(self._is_first) + int(self._is_last and not (shape.tie_embeddings and self._is_first))
        query, kv = shape.num_heads * shape.head_dim // parts, shape.num_kv_heads * shape.head_dim // self._kv_parts
        router = shape.num_experts * shape.hidden_size
        feed_forward = (flops.feed_forward_parameters(shape) - router) // parts + router
        layer = 2 * shape.hidden_size * (query + kv) + feed_forward + 2 * shape.hidden_size
        return self.num_layers * layer + matrices * words + int(self._is_last) * shape.hidden_size

    @property
    def _is_first(self) -> bool:
        return self.stage == 0

    @property
    def _is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def _kv_parts(self) -> int:
        """Neighbours hold the same key head where there are fewer heads than devices."""
        return min(self.tensor_parallel, self.architecture.num_kv_heads)

    @property
    def _wide(self) -> int:
        return max(4, self.element_bytes)

    @property
    def parameter_bytes(self) -> int:
        """The weights that compute."""
        return self.num_parameters * self.element_bytes

    @property
    def gradient_bytes(self) -> int:
        """Gradient sums of all weights, fp32 or wider."""
        return self.num_parameters * self._wide

    @property
    def optimizer_bytes(self) -> int:
        """This rank's shard: two moments, and master weights where parameters are narrower.

        Gradients are reduced in place.
        """
        copies = 2 + int(self.element_bytes < self._wide)
        return copies * self._wide * -(-self.num_parameters // self.num_ranks)

    @property
    def states_bytes(self) -> int:
        """What is there between micro-batches too."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def layer_saved_bytes_per_token(self) -> int:
        """What a layer keeps from forward to backward: everything, its input, or its input and attention's result."""
        if self.checkpointing == "none":
            return self._layer_bytes
        result = self._query_bytes + self._lse_bytes
        return self._own_hidden_bytes + (result if self.checkpointing == "attention" else 0)

    @property
    def saved_bytes_per_token(self) -> int:
        """What all layers, the final norm and the rotary angles keep, of all micro-batches in flight."""
        return self.num_in_flight * (self.num_layers * self.layer_saved_bytes_per_token + self._beside_layers)

    @property
    def movable_bytes_per_token(self) -> int:
        """What the layers before the last two of every chunk keep, which may wait in host memory."""
        num_layers = sum(max(0, len(chunk) - RESIDENT_LAYERS) for chunk in self._chunks)
        return self.num_in_flight * num_layers * self.layer_saved_bytes_per_token

    def phases(self) -> tuple[Phase, ...]:
        """What comes on top of states and saved activations."""
        return (*(self._loss_phases() if self._is_last else ()), self._feed_forward_phase(), *self._attention_phases())

    def _loss_phases(self) -> tuple[Phase, Phase]:
        """Chunks of logits, and the head's gradient."""
        words = flops.head_parameters(self.architecture) // self.tensor_parallel
        vocab_size, wide = self.architecture.vocab_size / self.tensor_parallel, self._wide
        loss = Phase(
            name="loss",
            fixed_bytes=words * wide,
            bytes_per_token=self._hidden_bytes,
            chunk_tokens=self.loss_chunk_tokens,
            bytes_per_chunk_token=vocab_size * self._logit_bytes + 2 * self._hidden_bytes,
        )
        # The head's gradient is summed in fp32 or wider: what is added of it at a time is a copy.
        converted = min(words, self.head_chunk_numbers) if self.element_bytes < wide else 0
        head_gradient = replace(
            loss,
            fixed_bytes=words * wide + converted * self.element_bytes,
            bytes_per_chunk_token=vocab_size * self.element_bytes + 2 * self._hidden_bytes,
        )
        return loss, head_gradient

    def _feed_forward_phase(self) -> Phase:
        """Backward of a layer's second half."""
        inner = max(1, self.architecture.experts_per_token) * self.architecture.ffn_hidden_size * self.element_bytes
        inner //= self.tensor_parallel  # of its gradients as much as one of its tensors is there at a time
        phase = Phase(
            name="layer",
            fixed_bytes=self._largest_gradient,
            bytes_per_shared_token=self._ring_buffers_beside_feed_forward,
            chunk_tokens=self.feed_forward_rows,
        )
        if self.checkpointing == "none":
            return replace(phase, chunk_tokens=math.inf, bytes_per_token=self._hidden_bytes + inner)
        # The layer's first half, computed again; the second half's input, and the gradients of its output and input.
        held = self._first_half + 3 * self._own_hidden_bytes - self._final_norm
        chunk = self._feed_forward_inner + inner
        if self.tensor_parallel == 1:
            chunk += self._norm_saved - self._own_hidden_bytes + self._feed_forward_input + self._hidden_bytes
        else:  # norm and gathering are not part of the chunks; nor are the gathered gradients
            held += self._norm_saved - self._own_hidden_bytes + 3 * self._hidden_bytes
        return replace(phase, bytes_per_token=held, bytes_per_chunk_token=chunk)

    def _attention_phases(self) -> tuple[Phase, ...]:
        """Backward of attention, alone and in a ring, with what its kernels allocate.

        CUDA's is ``mha_varlen_bwd`` of ATen's flash_api.cpp; the CPU's returns gradients that are copied.
        """
        shape, parts, wide, groups = self.architecture, self.tensor_parallel, self._wide, self.head_groups
        query, kv = self._query_bytes, 2 * self._key_bytes
        if self.fused_attention:
            # Sums of dq, a number per row and head; where heads share keys, dk and dv of every query head.
            per_query_row = 4 * (shape.head_dim + 1) * shape.num_heads // parts
            per_key_row = 2 * query if shape.num_kv_heads < shape.num_heads else 0
        else:
            per_query_row, per_key_row = query, kv
        # The layer's second half is done, and so is the final norm; there is the residual stream's gradient.
        held = -self._second_half if self.checkpointing == "none" else self._first_half
        held += self._own_hidden_bytes - self._final_norm
        inside = 2 * query + kv  # gradients of output, q, k and v
        if groups > 1:
            # One group's q, k and v, and its output, which CUDA's kernel copies out of all heads'; the gradient of what
            # the projections read; where it is gathered, of the result.
            inside += query + kv + query * int(self.fused_attention)
            held += self._hidden_bytes * (1 if parts == 1 else 2)
        # In a ring there are sums of query gradients, where those are narrower. A block is of all queries and half of
        # the keys, or the other way round.
        buffers = self._ring_buffers
        sums = query * wide // self.element_bytes if self.element_bytes < wide else 0
        rows = query + per_query_row, kv + per_key_row
        block = max(rows[0] + rows[1] / 2, rows[0] / 2 + rows[1])
        return (
            Phase(
                name="attention",
                bytes_per_token=held + (inside + per_query_row + per_key_row) / groups,
                bytes_per_shared_token=buffers,
            ),
            Phase(
                name="ring",
                bytes_per_token=held + inside / groups,
                bytes_per_shared_token=buffers + (sums + block) / groups,
            ),
        )

    @property
    def _ring_buffers(self) -> float:
        """Two messages of keys and values and two of their gradients, of one group of heads."""
        kv = 2 * self._key_bytes
        gradient_bytes = flops.ring_gradient_bytes(self.element_bytes, self.ring_gradients)
        return (2 * kv + 2 * kv * gradient_bytes / self.element_bytes) / self.head_groups

    @property
    def _ring_buffers_beside_feed_forward(self) -> float:
        """In backward of the last layer's feed-forward part only what its recomputation has allocated.

        Layers before it have all buffers, but the last layer's saved activations are gone then.
        """
        recomputed = 4 * self._key_bytes / self.head_groups if self.checkpointing == "full" else 0.0
        return max(recomputed, self._ring_buffers - self.layer_saved_bytes_per_token)

    def limits(self, *, device_bytes: float = math.inf, host_bytes: float = math.inf) -> MemoryLimits:
        """The same as plain numbers, for ``plan.verify``."""
        return MemoryLimits(
            states_bytes=self.states_bytes + self.nccl_bytes,
            saved_bytes_per_token=self.saved_bytes_per_token,
            movable_bytes_per_token=self.movable_bytes_per_token,
            phases=self.phases(),
            device_bytes=device_bytes,
            host_bytes=host_bytes,
        )

    def capacity_tokens(self, device_bytes: float, moved_share: float = 0.0) -> int:
        """Tokens that one micro-batch may hold, all of them slices of a shared group (0: none).

        ``moved_share`` of them offloaded. Of this stage: the pipeline's is the least of its ``stages()``.
        """
        limits, fits, too_many = self.limits(), 0, 2**36
        while too_many - fits > 1:
            tokens = (fits + too_many) // 2
            if limits.device_peak(tokens, moved_share * tokens, tokens) <= device_bytes:
                fits = tokens
            else:
                too_many = tokens
        return fits

    @property
    def _hidden_bytes(self) -> int:
        return self.architecture.hidden_size * self.element_bytes

    @property
    def _own_hidden_bytes(self) -> int:
        """A row of the residual stream: of every N-th token."""
        return self._hidden_bytes // self.tensor_parallel

    @property
    def _query_bytes(self) -> int:
        return self.architecture.num_heads * self.architecture.head_dim * self.element_bytes // self.tensor_parallel

    @property
    def _key_bytes(self) -> int:
        """Keys of a token, or values."""
        return self.architecture.num_kv_heads * self.architecture.head_dim * self.element_bytes // self._kv_parts

    @property
    def _largest_gradient(self) -> int:
        """Of a matrix of the feed-forward part; experts' gradients come as one tensor."""
        shape = self.architecture
        matrix = shape.ffn_hidden_size * shape.hidden_size * self.element_bytes // self.tensor_parallel
        return max(1, shape.num_experts) * matrix

    @property
    def _layer_bytes(self) -> int:
        """What a layer saves in forward."""
        attention = self._hidden_bytes + 2 * self._query_bytes + 2 * self._key_bytes + self._lse_bytes
        return self._norm_saved + attention + self._second_half

    @property
    def _first_half(self) -> int:
        """What a layer's first half saves when it is computed again, in addition to what was kept of it."""
        attention = self._hidden_bytes + self._query_bytes + self._lse_bytes
        if self.head_groups == 1:
            attention += self._query_bytes + 2 * self._key_bytes
        return self._norm_saved + attention - self.layer_saved_bytes_per_token

    @property
    def _second_half(self) -> int:
        """What a layer's second half saves: norm and feed-forward part."""
        return self._norm_saved + self._feed_forward_input + self._feed_forward_inner

    @property
    def _norm_saved(self) -> int:
        """What an RMSNorm saves: its input, a number a row, and where it is several kernels, more."""
        return self._own_hidden_bytes + self._wide // self.tensor_parallel + self._norm_extra

    @property
    def _lse_bytes(self) -> int:
        return self._wide * self.architecture.num_heads // self.tensor_parallel

    @property
    def _feed_forward_input(self) -> int:
        """A dense block reads gathered rows; a router reads its own, and experts read copies (``_inner``)."""
        return self._own_hidden_bytes if self.architecture.num_experts else self._hidden_bytes

    @property
    def _feed_forward_inner(self) -> int:
        shape, parts = self.architecture, self.tensor_parallel
        counted = flops.feed_forward_saved_bytes_per_token(shape, bytes_per_element=self.element_bytes)
        wide_part = 4 * max(1, shape.experts_per_token) * shape.ffn_hidden_size * self.element_bytes
        return counted - wide_part + wide_part // parts

    @property
    def _norm_extra(self) -> int:
        """What an RMSNorm of several kernels saves in addition: normalised rows, in fp32 and in the compute dtype."""
        if self.fused_norm:
            return 0
        upcast = self.architecture.hidden_size * 4 if self.element_bytes < 4 else 0
        return (self._hidden_bytes + upcast) // self.tensor_parallel

    @property
    def _beside_layers(self) -> int:
        """Rotary angles (cosine and sine of half a head), the inputs, and the final norm or the output passed on."""
        angles = self.architecture.head_dim * self._wide
        return angles + (self._final_norm if self._is_last else self._own_hidden_bytes) + _INPUT_BYTES_PER_TOKEN

    @property
    def _final_norm(self) -> int:
        """Its input and its output; 0 on stages before the last."""
        if not self._is_last:
            return 0
        return self._norm_saved + self._hidden_bytes

    @property
    def _logit_bytes(self) -> int:
        """Of one logit: in fp32, and while it is converted, in the compute dtype as well."""
        if self.fused_loss or self.element_bytes == self._wide:
            return self.element_bytes
        return self._wide + self.element_bytes


def nccl_reserve_bytes(num_hdp_ranks: int, tensor_parallel: int, num_stages: int) -> int:
    """What NCCL holds on one rank of a mesh: for its communicators, and for every neighbour that it may get.

    Over a run a rank meets all HDP ranks of its node in rings, and the stages before and after its own.
    """
    hdp, tp, pp = (size > 1 for size in (num_hdp_ranks, tensor_parallel, num_stages))
    communicators = int(hdp or tp or pp) + int(hdp) + int(hdp and (tp or pp)) + int(tp)  # world, gradients, HDP, TP
    neighbours = min(num_hdp_ranks, _GPUS_PER_NODE) - 1 + 2 * int(pp)
    return NCCL_BYTES_PER_NEIGHBOUR * (communicators + neighbours)


def is_row_wise(architecture: Architecture, tensor_parallel: int) -> bool:
    """Whether feed-forward parts treat every row alone: not mixtures whose rows move between ranks inside."""
    return not (architecture.num_experts and tensor_parallel > 1)


def loss_chunk_tokens(vocab_size: int, kind: str) -> int:
    """Tokens whose logits over ``vocab_size`` words exist at a time on a device of this ``kind``."""
    return max(1, LOGITS_PER_CHUNK[kind] // vocab_size)
