"""What one device of a rank holds at the peak of a micro-batch, and how many tokens fit. All results are in bytes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from bytescale.common.errors import ConfigError
from bytescale.common.units import format_bytes
from bytescale.config.schema import AUTO_CAPACITY
from bytescale.cost.gradient_sync import MOST_BUCKETS
from bytescale.cost.offload_rule import OffloadRule
from bytescale.cost.profile import Profile
from bytescale.plan.limits import MemoryLimits, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of one device. Gradient sums, moments and master weights are in fp32 or wider."""

    num_parameters: int
    """Weights on this device that are trained."""
    element_bytes: int
    """2 for bf16, 4 for fp32, 8 for fp64."""
    num_ranks: int
    """HDP ranks, over which the optimizer's states are sharded."""
    num_frozen: int = 0
    """Further weights on this device, which are not trained."""
    domain: int = 1
    """Ranks that share weights (``runtime.optimizer.units``)."""
    trained_of_units: tuple[int, ...] = ()
    """How many of ``num_parameters`` they share in the embedding, each layer, the head, and what is both ends."""
    frozen_of_units: tuple[int, ...] = ()
    """The same of ``num_frozen``."""
    trained_experts: tuple[int, ...] = ()
    """How many of ``trained_of_units`` are experts'; empty: none."""
    frozen_experts: tuple[int, ...] = ()
    """How many of ``frozen_of_units`` are."""
    experts_in_parallel: bool = False
    """Whether experts are never gathered (``runtime.experts``)."""
    on_host: bool = False
    """Whether master weights and moments are in host memory (``runtime.optimizer.host_states``)."""

    @property
    def parameter_bytes(self) -> int:
        """The weights that compute: a rank's part of the units, and two neighbouring ones that are open."""
        units = [sum(both) for both in zip(self.trained_of_units, self.frozen_of_units, strict=True)]
        pairs = zip_longest(self.trained_experts, self.frozen_experts, fillvalue=0)
        experts = [sum(both) for both in pairs]
        return self._held(self.num_parameters + self.num_frozen, units, experts) * self.element_bytes

    @property
    def gradient_bytes(self) -> int:
        """Gradient sums of all weights that are trained, likewise."""
        return self._held(self.num_parameters, self.trained_of_units, self.trained_experts) * self._wide

    def _held(self, total: int, of_units: Sequence[int], experts: Sequence[int]) -> int:
        """Of ``total`` weights, how many a rank has at a time."""
        if self.domain == 1:
            return total
        apart = experts if self.experts_in_parallel else ()
        gathered = [a - b for a, b in zip_longest(of_units, apart, fillvalue=0)]
        embedding, *layers, head, tied = gathered
        most = max(a + b for a, b in pairwise([embedding + tied, *layers, head + tied]))
        return total - sum(of_units) + sum(-(-own // self.domain) for own in (*gathered, *apart)) + most

    @property
    def optimizer_bytes(self) -> int:
        """This rank's shard: two moments, and master weights where parameters are narrower or elsewhere.

        Gradients are reduced in place.
        """
        copies = 2 + int(self.on_host or self.element_bytes < self._wide)
        return copies * self._wide * -(-self.num_parameters // self.num_ranks)

    @property
    def host_bytes(self) -> int:
        """Of this, what host memory holds, with two buffers for a rank's part of a bucket each."""
        largest = max((-(-self.num_parameters // MOST_BUCKETS), *(self.trained_of_units if self.domain > 1 else ())))
        return self.on_host * (self.optimizer_bytes + 2 * self._wide * -(-largest // self.num_ranks))

    @property
    def device_bytes(self) -> int:
        """Of everything, what the device holds between two micro-batches."""
        return self.parameter_bytes + self.gradient_bytes + (0 if self.on_host else self.optimizer_bytes)

    @property
    def _wide(self) -> int:
        return max(4, self.element_bytes)


class DeviceMemory(ABC):
    """The memory of one device.

    At any moment the device holds its states (parameters, gradient sums, its shard of the optimizer) and what the
    layers have saved for backward. One of the phases comes on top.
    """

    __slots__ = ()
    nccl_bytes: int

    @property
    @abstractmethod
    def states(self) -> States:
        """What also exists between micro-batches."""

    @property
    @abstractmethod
    def saved_bytes_per_token(self) -> float:
        """What all layers keep of a token from forward to backward."""

    @property
    @abstractmethod
    def layer_saved_bytes_per_token(self) -> float:
        """What a layer keeps of a token, of one micro-batch."""

    @property
    @abstractmethod
    def movable_bytes_per_token(self) -> float:
        """The part of it that may wait in host memory."""

    @abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """What comes on top of states and saved activations."""

    @abstractmethod
    def offload_rule(self, times: Profile, host_bytes: float) -> OffloadRule:
        """What a micro-batch may offload into ``host_bytes`` of a rank."""

    def fullest_stage(self, device_bytes: float) -> DeviceMemory:
        """The same for the pipeline stage that has room for the fewest tokens: itself, unless there are stages."""
        return self

    def limits(self, *, device_bytes: float = math.inf, host_bytes: float = math.inf) -> MemoryLimits:
        """The same as plain numbers, for ``plan.verify``."""
        return MemoryLimits(
            states_bytes=self.states.device_bytes + self.nccl_bytes,
            saved_bytes_per_token=self.saved_bytes_per_token,
            movable_bytes_per_token=self.movable_bytes_per_token,
            phases=self.phases(),
            device_bytes=device_bytes,
            host_bytes=host_bytes,
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
            "activations": self.saved_bytes_per_token * tokens,
            phase.name: float(phase.bytes(tokens, shared)),
        }
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())


def host_bytes_left(states: States, host_bytes: float, who: str = "a rank") -> float:
    """What of ``host_bytes`` is left beside the optimizer. Raises ``ConfigError`` where it has no room."""
    if states.host_bytes > host_bytes:
        raise ConfigError(
            f"host memory is too small: with an optimizer that is offloaded, master weights and states need "
            f"{format_bytes(states.host_bytes)} a rank, of {format_bytes(host_bytes)} that {who} may use",
            so="the system would kill the ranks, or swap",
            fix="use more ranks (the optimizer is sharded over them), machines with more memory, or more of "
            "their memory (memory.host_gib; host_gib of HDP is for activations alone)",
        )
    return host_bytes - states.host_bytes


def fitting_capacity(model: DeviceMemory, wanted: int, usable_bytes: float, who: str = "a rank") -> int:
    """Return ``wanted`` tokens a micro-batch, or as many as fit if ``wanted`` is ``AUTO_CAPACITY``.

    Args:
        model: the memory of the pipeline's fullest stage, or of a measured model.
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
