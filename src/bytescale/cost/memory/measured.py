"""Peak memory of a model: counted where counting is exact, and measured on a few rows elsewhere.

States and logits follow from numbers of weights and words, and a ring's buffers from the widths of heads. What layers
keep of a token, and what their backward needs beside it, is measured at two numbers of rows (``hf.costs.measure``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bytescale.common.arrays import FloatArray
from bytescale.common.errors import ConfigError
from bytescale.common.units import format_bytes
from bytescale.config.schema import AUTO_CAPACITY, Config
from bytescale.cost.curve import Curve
from bytescale.cost.memory.device_kernels import HEAD_NUMBERS_PER_CHUNK, ROWS_PER_CHUNK, DeviceKind, loss_chunk_tokens
from bytescale.cost.memory.device_memory import States
from bytescale.cost.offload_rule import OffloadRule
from bytescale.cost.profile import Profile
from bytescale.cost.stage import movable_layers
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
        chunked_per_token: what row-wise parts add to the peak, of the rows that they process at a time.
        encoder_saved, encoder_peak, encoder_fixed: the same as the first three of an encoder, for each row it makes.
        encoder_row: of such a row; 0: there is no encoder, or none that could be measured.
        encoder_patches: how many patches make a row (``encoders.frames_of``). No bytes.
        encoder_forward_flops, encoder_backward_flops: operations for a row beside attention, with what runs again.
    """

    saved_per_token: float
    peak_per_token: float
    fixed: float
    movable_per_token: float = 0.0
    moved_per_token: float = 0.0
    chunked_per_token: float = 0.0
    encoder_saved: float = 0.0
    encoder_peak: float = 0.0
    encoder_fixed: float = 0.0
    encoder_row: float = 0.0
    encoder_patches: float = 0.0
    encoder_forward_flops: float = 0.0
    encoder_backward_flops: float = 0.0

    def encoder_seconds(self, work: FloatArray, profile: Profile) -> tuple[FloatArray, ...]:
        """``[R]`` seconds of HDP ranks' encoders before the text and behind it. ``work``: rows of all that encode."""
        if not self.encoder_forward_flops:
            return ()
        seconds = work.reshape(-1, profile.tensor_parallel).max(axis=1) / profile.flops_per_second
        return seconds * self.encoder_forward_flops, seconds * self.encoder_backward_flops

    def of_all(self, smallest: Callable[[Sequence[float]], Sequence[float]]) -> MeasuredRows:
        """What holds on all ranks. ``smallest``: the minimum over ranks of each of these numbers."""
        most = asdict(self)
        movable = most.pop("movable_per_token")
        *others, movable = smallest([*(-value for value in most.values()), movable])
        return MeasuredRows(
            **{name: -value for name, value in zip(most, others, strict=True)}, movable_per_token=movable
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWidths:
    """Bytes of one row in the messages of a ring, of the widest layer of a kind; 0 where the model has none.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """The memory of one device: of the model, or of a pipeline stage.

    At any moment the device holds its states (parameters, gradient sums, its shard of the optimizer) and what the
    layers have saved for backward. One of the phases comes on top.
    """

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

    num_layers: int = 1
    num_in_flight: int = 1
    """Micro-batches whose activations a pipeline stage holds at a time, each taken to be as large as the one in it."""
    has_head: bool = True
    embedding_numbers: int = 0
    """Weights of the embedding that are trained here. Its gradient exists at once before it is added to the others."""
    picture_bytes: float = 0.0
    """What a batch's pictures hold while its text runs (``Items.memory``)."""
    other_stages: tuple[MeasuredMemory, ...] = ()
    """Of the pipeline that this stage belongs to."""
    first_stage: MeasuredMemory | None = None
    """Of the same; None: it is this one."""

    @staticmethod
    def of_stages(told: Sequence[dict[str, Any]]) -> MeasuredMemory:
        """From what ``dataclasses.asdict`` makes of each stage, in order. All know the first one's encoders."""
        of_encoder = {name: value for name, value in told[0]["rows"].items() if name.startswith("encoder")}
        stages = [
            MeasuredMemory(
                **{
                    **own,
                    "states": States(**own["states"]),
                    "rows": MeasuredRows(**{**own["rows"], **of_encoder}),
                    "rings": tuple(RingWidths(**ring) for ring in own["rings"]),
                    "other_stages": (),
                }
            )
            for own in told
        ]
        return replace(stages[0], other_stages=tuple(stages[1:]))

    def of_run(self, config: Config, *, domain: int = 1) -> MeasuredMemory:
        """The same in a run with these settings, whose layers' weights are shared by ``domain`` HDP ranks."""
        in_parallel = config.parallel.experts == "parallel" and domain > 1
        on_host, is_copied = config.optimizer.offload, config.parallel.elastic
        return self.with_states(domain=domain, experts_in_parallel=in_parallel, on_host=on_host, is_copied=is_copied)

    def with_states(self, **changes: Any) -> MeasuredMemory:
        """The same with other ``States``, on every stage."""
        others = tuple(own.with_states(**changes) for own in self.other_stages)
        return replace(self, states=replace(self.states, **changes), other_stages=others)

    def of_part(self, num_parts: int, share: float) -> MeasuredMemory:
        """An estimate for one of ``num_parts`` tensor-parallel ranks that have a ``share`` of the weights each.

        Their rows are as many times fewer, but for those that a layer gathers, two for each token, and half as many
        that it has to add up over ranks.
        """
        gathered = 3.0 * self.num_layers * self.hidden_size * self.states.element_bytes
        rows = asdict(self.rows)
        of_part = {name: value / (num_parts if "token" in name else 1) for name, value in rows.items()}
        of_part |= {name: of_part[name] + gathered for name in ("saved_per_token", "peak_per_token")}
        states = self.states
        numbers: dict[str, Any] = {
            name: tuple(math.ceil(share * number) for number in getattr(states, name))
            for name in ("trained_of_units", "frozen_of_units", "trained_experts", "frozen_experts")
        }
        for name in ("num_parameters", "num_frozen"):
            numbers[name] = math.ceil(share * getattr(states, name))
        rings = (
            replace(own, query=own.query / num_parts, keys=own.keys / num_parts, lse=own.lse / num_parts)
            for own in self.rings
        )
        words = self.embedding_numbers // num_parts
        return replace(
            self,
            rows=MeasuredRows(**of_part),
            states=replace(states, **numbers),
            rings=tuple(rings),
            embedding_numbers=words,
        )

    def fullest_stage(self, device_bytes: float) -> MeasuredMemory:
        """The same for the pipeline stage that has room for the fewest tokens: itself, unless there are stages."""
        fullest = min((self, *self.other_stages), key=lambda stage: stage.capacity_tokens(device_bytes))
        return fullest if fullest is self else replace(fullest, first_stage=self)

    @property
    def saved_bytes_per_token(self) -> float:
        """What all layers keep of a token from forward to backward."""
        return self.rows.saved_per_token * self.num_in_flight

    @property
    def layer_saved_bytes_per_token(self) -> float:
        """What a layer keeps of a token, of one micro-batch."""
        return self.rows.saved_per_token / self.num_layers

    @property
    def movable_bytes_per_token(self) -> float:
        """The part of it that may wait in host memory."""
        return self.rows.movable_per_token * self.num_in_flight

    def phases(self) -> tuple[Phase, ...]:
        """What comes on top of states and saved activations."""
        beside = max(0.0, self.rows.peak_per_token - self.rows.saved_per_token) + self.kernel_bytes_per_token
        layers = Phase(
            name="layer",
            fixed_bytes=self.rows.fixed,
            bytes_per_token=beside,
            chunk_tokens=ROWS_PER_CHUNK[self.kind],
            bytes_per_chunk_token=self.rows.chunked_per_token,
        )
        ends = [self._loss()] if self.has_head else []
        if self.embedding_numbers:
            size, row = (float(n * self.states.element_bytes) for n in (self.embedding_numbers, self.hidden_size))
            ends.append(Phase(name="embedding", fixed_bytes=size, bytes_per_token=row))
        return (*ends, layers, *(self._ring(ring, beside) for ring in self.rings))

    def limits(self, *, device_bytes: float = math.inf, host_bytes: float = math.inf) -> MemoryLimits:
        """The same as plain numbers, for ``plan.verify``. What else keeps moved bytes alive takes host memory, too."""
        freed, first = self.rows.movable_per_token / (self.rows.moved_per_token or math.inf), self.first_stage
        return MemoryLimits(
            states_bytes=self.states.device_bytes + self.nccl_bytes + self.picture_bytes,
            saved_bytes_per_token=self.saved_bytes_per_token,
            movable_bytes_per_token=self.movable_bytes_per_token,
            phases=self.phases(),
            device_bytes=device_bytes,
            host_bytes=host_bytes * freed,
            first_stage=None if first is None else first.limits(device_bytes=device_bytes, host_bytes=host_bytes),
        )

    def capacity_tokens(self, device_bytes: float, moved_share: float = 0.0) -> int:
        """The tokens that one micro-batch may hold if all of them are slices of a shared group (0: none).

        ``moved_share`` of them are offloaded. This is for this stage alone: a pipeline's capacity is the least of all
        its stages.
        """
        return self.limits().most_tokens(device_bytes, moved_share)

    def parts_in_words(self, tokens: int, shared: int) -> str:
        """The parts of the peak of a micro-batch of ``tokens``, ``shared`` of them in a slice of a shared group."""
        states, phase = self.states, self.limits().worst_phase(tokens, shared)
        parts = {
            "parameters": states.parameter_bytes,
            "gradients": states.gradient_bytes,
            **({} if states.on_host else {"optimizer": states.optimizer_bytes}),
            **({"NCCL": self.nccl_bytes} if self.nccl_bytes else {}),
            **({"pictures": self.picture_bytes} if self.picture_bytes else {}),
            "activations": self.saved_bytes_per_token * tokens,
            phase.name: float(phase.bytes(tokens, shared)),
        }
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())

    def with_activations(self, profile: Profile, checkpointing: str) -> Profile:
        """``profile`` with what a layer keeps of a token. Profiles that know it know it without checkpointing."""
        if checkpointing == "none" and profile.activation_bytes.linear:
            return profile
        return replace(profile, activation_bytes=Curve(0.0, self.layer_saved_bytes_per_token, 0.0))

    def offload_rule(self, times: Profile, host_bytes: float) -> OffloadRule:
        """What a micro-batch may offload into ``host_bytes`` of a rank.

        Raises ``ConfigError`` where that frees nothing.
        """
        if self.limits().movable_share <= 0:
            raise ConfigError(
                f"activations shall be offloaded, but that frees no memory of this model of {self.num_layers} layers",
                so="it would cost time and gain nothing (the last two layers always stay on the device)",
                fix='set memory.offload = "off", or leave out host_gib of HDP',
            )
        return OffloadRule.of_layers(
            times,
            self.rows.moved_per_token / movable_layers(self.num_layers),
            num_layers=self.num_layers,
            movable_share=self.limits().movable_share,
            host_bytes=host_bytes / self.num_in_flight,
        )

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
        wide = ring.wide
        messages = 2 * ring.keys * (1 + wide)
        phase = Phase(name="ring", fixed_bytes=self.rows.fixed, bytes_per_token=beside)
        if ring.window is not None:
            return replace(
                phase,
                name=f"ring of a window of {ring.window}",
                fixed_bytes=self.rows.fixed + 2.0 * (ring.window - 1) * messages,
                bytes_per_shared_token=2 * ring.query + ring.keys,
            )
        # Along a grid's row: a slice's queries, and results that go and come, in buffers for both passes.
        queries, results = 2 * ring.query + 2 * ring.lse, 2 * max(ring.query * wide, ring.query + ring.lse)
        return replace(
            phase,
            bytes_per_shared_token=messages + 2 * ring.query + ring.keys,
            # Sums of the own keys' gradients, an output of the row's, and sums of its queries'.
            bytes_per_grid_token=queries + 2 * ring.keys * wide,
            bytes_per_row_token=queries + results + ring.query * (1 + wide),
        )


def fitting_capacity(model: MeasuredMemory, wanted: int, usable_bytes: float, who: str = "a rank") -> int:
    """Return ``wanted`` tokens a micro-batch, or as many as fit if ``wanted`` is ``AUTO_CAPACITY``.

    Args:
        model: the memory of the pipeline's fullest stage.
        usable_bytes: what a rank may use of its device.
        who: the rank, for messages.

    Raises:
        ConfigError: nothing fits, or fewer tokens than ``wanted``.
    """
    fits = model.capacity_tokens(usable_bytes)
    if fits == 0:
        raise ConfigError(
            f"{'NCCL, ' if model.nccl_bytes else ''}parameters, gradients and optimizer need "
            f"{format_bytes(model.states.device_bytes + model.nccl_bytes)} a rank, of "
            f"{format_bytes(usable_bytes)} that {who} may use",
            so="not one token would fit beside them",
            fix="use more ranks (the optimizer is sharded over them), more devices per rank (tp, pp), "
            + ("" if model.states.on_host else "optimizer.offload, ")
            + 'parallel.shard = "parameters", a smaller model, or a larger device_gib',
        )
    if wanted == AUTO_CAPACITY:
        return fits
    if wanted > fits:
        needed = float(model.limits().device_peak(wanted, 0, wanted))
        raise ConfigError(
            f"a micro-batch of parallel.capacity_tokens = {wanted} needs {format_bytes(needed)}, "
            f"{format_bytes(needed - usable_bytes)} more than the {format_bytes(usable_bytes)} that {who} may use",
            so="training would run out of memory",
            fix=f'set parallel.capacity_tokens to {fits} or less (or "auto"), memory.checkpointing to attention '
            "or full, or memory.device_gib",
        )
    return wanted
