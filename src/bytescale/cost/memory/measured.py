"""Peak memory of a model that is not ours: counted where counting is exact, and measured on a few rows elsewhere.

States and logits follow from numbers of weights and words, and a ring's buffers from the widths of heads. What layers
keep of a token, and what their backward needs beside it, is measured at two numbers of rows (``attach.measure``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bytescale.cost.memory.device_kernels import HEAD_NUMBERS_PER_CHUNK, DeviceKind, loss_chunk_tokens
from bytescale.cost.memory.states import States
from bytescale.plan.limits import MemoryLimits, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRows:
    """What a micro-batch of whole documents was seen to need. Bytes.

    Attributes:
        saved_per_token: of all layers, from forward to backward.
        peak_per_token: at the highest point of forward and backward, ``saved_per_token`` included.
        fixed: at that point, however many rows there are.
        movable_per_token: of ``saved_per_token``, what left the device when all of it that may move was offloaded.
        moved_per_token: what host memory held then. More than the former where something else keeps memory alive.
    """

    saved_per_token: float
    peak_per_token: float
    fixed: float
    movable_per_token: float = 0.0
    moved_per_token: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWidths:
    """Bytes of one row in attention, of the widest layer of a kind; 0 where the model has none.

    Attributes:
        query: of the queries and of the output, whichever is wider.
        keys: of keys and values together.
        key_gradients: the same, in the dtype in which gradients travel.
        window: keys that a query sees; None: all of them.
    """

    query: int
    keys: int
    key_gradients: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """The same for a measured model as ``MemoryModel`` is for ours, on one device that has the whole model."""

    states: States
    rows: MeasuredRows
    rings: tuple[RingWidths, ...]
    """Of the layers without a window, and of those of each window."""
    vocab_size: int
    head_numbers: int
    """Weights of the output projection."""
    hidden_size: int
    kind: DeviceKind
    plain_head: bool
    """Whether the runtime's own loss computes the logits; otherwise the model's head does."""
    kernel_bytes_per_token: float = 0.0
    """What CUDA's attention kernel allocates in backward, which is not seen when rows are measured."""
    nccl_bytes: int = 0

    head_groups: int = 1
    most_head_groups: int = 1

    @property
    def element_bytes(self) -> int:
        """Bytes of a number in the compute dtype."""
        return self.states.element_bytes

    @property
    def parameter_bytes(self) -> int:
        """The weights that compute."""
        return self.states.parameter_bytes

    @property
    def gradient_bytes(self) -> int:
        """Gradient sums of all weights, in fp32 or wider."""
        return self.states.gradient_bytes

    @property
    def optimizer_bytes(self) -> int:
        """This rank's shard of master weights and moments."""
        return self.states.optimizer_bytes

    @property
    def states_bytes(self) -> int:
        """What also exists between micro-batches."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def saved_bytes_per_token(self) -> float:
        """What all layers keep of a token, from forward to backward."""
        return self.rows.saved_per_token

    @property
    def movable_bytes_per_token(self) -> float:
        """The part of it that may wait in host memory."""
        return self.rows.movable_per_token

    def phases(self) -> tuple[Phase, ...]:
        """What comes on top of states and saved activations."""
        beside = max(0.0, self.rows.peak_per_token - self.rows.saved_per_token) + self.kernel_bytes_per_token
        layers = Phase(name="layer", fixed_bytes=self.rows.fixed, bytes_per_token=beside)
        return (self._loss(), layers, *(self._ring(ring, beside) for ring in self.rings))

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
        """The tokens that one micro-batch may hold if all of them are slices of a shared group (0: none)."""
        return self.limits().most_tokens(device_bytes, moved_share)

    def _loss(self) -> Phase:
        """Chunks of logits, the gradient of hidden states, and the head's in fp32 or wider."""
        element, wide = self.states.element_bytes, max(4, self.states.element_bytes)
        logit = (element if element == wide else wide + element) if self.plain_head else 3 * wide + 2 * element
        converted = min(self.head_numbers, HEAD_NUMBERS_PER_CHUNK[self.kind]) if self.plain_head else self.head_numbers
        hidden = self.hidden_size * element
        return Phase(
            name="loss",
            fixed_bytes=self.head_numbers * wide + converted * element,
            bytes_per_token=hidden,
            chunk_tokens=loss_chunk_tokens(self.vocab_size, self.kind),
            bytes_per_chunk_token=self.vocab_size * logit + 2 * hidden,
        )

    def _ring(self, ring: RingWidths, beside: float) -> Phase:
        """Backward of attention over a shared group.

        Without a window there are two messages of keys and values and two of their gradients, sums of the queries'
        gradients, and a block's gradients. With one there are the rows that it reaches before both segments of a
        sequence, and those that two other members reach.
        """
        messages = 2 * (ring.keys + ring.key_gradients)
        if ring.window is None:
            shared, fixed = messages + 2 * ring.query + ring.keys, 0.0
        else:
            shared, fixed = 2 * ring.query + ring.keys, 2.0 * (ring.window - 1) * messages
        return Phase(
            name="ring" if ring.window is None else f"ring of a window of {ring.window}",
            fixed_bytes=self.rows.fixed + fixed,
            bytes_per_token=beside,
            bytes_per_shared_token=shared,
        )
