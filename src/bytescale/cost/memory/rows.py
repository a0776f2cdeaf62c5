"""The share of a model that one device has, and the bytes that one token takes there in each tensor of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bytescale.config.architecture import Architecture
from bytescale.cost import flops
from bytescale.cost.memory.device_kernels import KernelMemory
from bytescale.cost.split import split_layers

Checkpointing = Literal["none", "full", "attention"]
_INPUT_BYTES = 3 * 8  # token, label and position, int64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShare:
    """What one device has of a model, in a stage and under tensor parallelism (``train.parts.tensor_parallel``)."""

    architecture: Architecture
    tensor_parallel: int = 1
    num_stages: int = 1
    stage: int = 0

    @property
    def num_layers(self) -> int:
        return len(split_layers(self.architecture, self.num_stages)[self.stage])

    @property
    def is_first(self) -> bool:
        """Whether this is the stage with the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the stage with the final norm, the head and the loss."""
        return self.stage == self.num_stages - 1

    @property
    def key_parts(self) -> int:
        """Parts that the key heads are cut into. With fewer heads than devices, neighbours hold the same head."""
        return min(self.tensor_parallel, self.architecture.num_kv_heads)

    @property
    def key_heads(self) -> int:
        return self.architecture.num_kv_heads // self.key_parts

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose activations this stage holds at the same time."""
        return self.num_stages - self.stage

    @property
    def num_parameters(self) -> int:
        return flops.device_parameters(
            self.architecture,
            num_layers=self.num_layers,
            is_first=self.is_first,
            is_last=self.is_last,
            tensor_parallel=self.tensor_parallel,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWidths:
    """Bytes of one row, of the widest layer of a kind; 0 where the model has none.

    Attributes:
        query: of the queries and of the output, whichever is wider.
        keys: of keys and values together.
        lse: a number per head, in the dtype of sums.
        wide: bytes of a number in a sum, over those in the compute dtype.
        window: keys that a query sees; None: all of them.
    """

    query: float
    keys: float
    lse: float
    wide: float
    window: int | None = None

    @property
    def own_message(self) -> float:
        """The message with a slice's queries."""
        return 2 * self.query + 2 * self.lse

    @property
    def row_buffers(self) -> float:
        """Messages of a grid's row, per token of other columns: their queries, and results that go and that come.

        A buffer of results holds those of forward or of backward, whichever is larger.
        """
        return self.own_message + 2 * max(self.query * self.wide, self.query + self.lse)

    @property
    def ring_buffers(self) -> float:
        """Two messages of keys and values and two of their gradients."""
        return 2 * self.keys * (1 + self.wide)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBytes:
    """Bytes of one token's row on one device. Under tensor parallelism over N devices, a device has every N-th row of
    the residual stream and of the norms, and all rows of what the matrices read, which is gathered.
    """

    hidden: int
    """A row of hidden states, gathered."""
    own_hidden: int
    """A row of the residual stream, averaged over all tokens: this device has every N-th token."""
    query: int
    """The queries of this device's heads, or attention's output."""
    key: int
    """The keys of this device's heads, or the values."""
    lse: int
    """The log-sum-exp of each head, in fp32 or wider."""
    norm: int
    """What an RMSNorm saves: its input, one number a row, and more if it is not one kernel."""
    feed_forward_input: int
    """What the feed-forward part reads. A mixture's router reads the device's own rows."""
    feed_forward_inner: int
    """What the feed-forward part saves inside. Experts read copies of their rows."""
    logit: int
    """One logit. While it is converted it exists twice."""
    kept: int
    """What a layer keeps from forward to backward: everything, its input, or its input and attention's result."""
    beside_layers: int
    """Rotary angles, the inputs, and the final norm or the output that is passed on."""
    final_norm: int
    """The input and the output of the final norm. It is 0 on stages before the last."""

    @staticmethod
    def of(share: ModelShare, kernels: KernelMemory, *, element_bytes: int, checkpointing: Checkpointing) -> RowBytes:
        """Count the rows of a device with this share of the model."""
        shape, parts, wide = share.architecture, share.tensor_parallel, max(4, element_bytes)
        hidden = shape.hidden_size * element_bytes
        own_hidden = hidden // parts
        query = shape.num_heads * shape.head_dim * element_bytes // parts
        key = shape.num_kv_heads * shape.head_dim * element_bytes // share.key_parts
        lse = wide * shape.num_heads // parts
        norm = own_hidden + wide // parts
        if not kernels.fused_norm:  # several kernels also save normalised rows, in the compute dtype and in fp32
            norm += (hidden + (shape.hidden_size * 4 if element_bytes < 4 else 0)) // parts
        feed_forward_input = own_hidden if shape.num_experts else hidden
        counted = flops.feed_forward_saved_bytes_per_token(shape, bytes_per_element=element_bytes)
        sharded = 4 * max(1, shape.experts_per_token) * shape.ffn_hidden_size * element_bytes
        feed_forward_inner = counted - sharded + sharded // parts
        kept = {
            "none": 2 * norm + hidden + 2 * query + 2 * key + lse + feed_forward_input + feed_forward_inner,
            "full": own_hidden,
            "attention": own_hidden + query + lse,
        }[checkpointing]
        final_norm = norm + hidden if share.is_last else 0
        angles = shape.head_dim * wide  # cosine and sine of half a head
        return RowBytes(
            hidden=hidden,
            own_hidden=own_hidden,
            query=query,
            key=key,
            lse=lse,
            norm=norm,
            feed_forward_input=feed_forward_input,
            feed_forward_inner=feed_forward_inner,
            logit=element_bytes if kernels.fused_loss or element_bytes == wide else wide + element_bytes,
            kept=kept,
            beside_layers=angles + (final_norm if share.is_last else own_hidden) + _INPUT_BYTES,
            final_norm=final_norm,
        )

    @property
    def second_half(self) -> int:
        """What a layer's second half saves: its norm and the feed-forward part."""
        return self.norm + self.feed_forward_input + self.feed_forward_inner

    def first_half(self, head_groups: int) -> int:
        """What a layer's first half saves when it is computed again, in addition to what was kept of it."""
        attention = self.hidden + self.query + self.lse
        if head_groups == 1:
            attention += self.query + 2 * self.key
        return self.norm + attention - self.kept
