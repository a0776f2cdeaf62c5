"""What one device of a rank holds between two micro-batches. All results are in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from bytescale.common.errors import ConfigError
from bytescale.common.units import format_bytes
from bytescale.cost.gradient_sync import MOST_BUCKETS


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
    is_copied: bool = False
    """Whether host memory has copies of two updates, of a rank's own and another's (``runtime.optimizer.copies``)."""

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
        return (2 + int(self.on_host or self.element_bytes < self._wide)) * self._state_bytes

    @property
    def host_bytes(self) -> int:
        """What host memory holds of it, with two buffers for a rank's part of a bucket each, and of copies."""
        largest = max((-(-self.num_parameters // MOST_BUCKETS), *(self.trained_of_units if self.domain > 1 else ())))
        own = self.optimizer_bytes + 2 * self._wide * -(-largest // self.num_ranks)
        return self.on_host * own + 4 * self.is_copied * 3 * self._state_bytes  # weights are copied, too

    @property
    def device_bytes(self) -> int:
        """Of everything, what the device holds between two micro-batches."""
        return self.parameter_bytes + self.gradient_bytes + (0 if self.on_host else self.optimizer_bytes)

    @property
    def _state_bytes(self) -> int:
        return self._wide * -(-self.num_parameters // self.num_ranks)

    @property
    def _wide(self) -> int:
        return max(4, self.element_bytes)


def host_bytes_left(states: States, host_bytes: float, who: str = "a rank") -> float:
    """What of ``host_bytes`` is left beside the optimizer. Raises ``ConfigError`` where it has no room."""
    if states.host_bytes > host_bytes:
        raise ConfigError(
            "host memory is too small: states of the optimizer that are offloaded, or copied for others "
            f"(parallel.elastic), need {format_bytes(states.host_bytes)} a rank, of {format_bytes(host_bytes)} that "
            f"{who} may use",
            so="the system would kill the ranks, or swap",
            fix="use more ranks (the optimizer is sharded over them), machines with more memory, or more of "
            "their memory (memory.host_gib; host_gib of HDP is for activations alone)",
        )
    return host_bytes - states.host_bytes
