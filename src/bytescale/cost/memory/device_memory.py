"""What one device of a rank holds at the peak of a micro-batch, and how many tokens fit. All results are in bytes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from bytescale.common.units import format_bytes
from bytescale.cost.memory.states import States
from bytescale.cost.offload_rule import OffloadRule
from bytescale.cost.profile import Profile
from bytescale.plan.limits import MemoryLimits, Phase


class DeviceMemory(ABC):
    """The memory of one device: counted from a model's shape (``MemoryModel``), or measured (``MeasuredMemory``).

    At any moment the device holds its states (parameters, gradient sums, its shard of the optimizer) and what the
    layers have saved for backward. One of the phases comes on top.
    """

    __slots__ = ()
    head_groups: int
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

    @abstractmethod
    def fullest_stage(self, device_bytes: float) -> DeviceMemory:
        """The same for the pipeline stage that has room for the fewest tokens."""

    @property
    def most_head_groups(self) -> int:
        """The largest number of groups of heads that attention can take one after the other."""
        return 1

    @property
    def states_bytes(self) -> int:
        """Parameters, gradients and this rank's shard of the optimizer."""
        return self.states.parameter_bytes + self.states.gradient_bytes + self.states.optimizer_bytes

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
            "optimizer": states.optimizer_bytes,
            **({"NCCL": self.nccl_bytes} if self.nccl_bytes else {}),
            "activations": self.saved_bytes_per_token * tokens,
            phase.name: float(phase.bytes(tokens, shared)),
        }
        groups = f"; attention in {self.head_groups} groups of heads" if self.head_groups > 1 else ""
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items()) + groups
