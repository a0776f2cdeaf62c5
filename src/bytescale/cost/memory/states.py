"""What a device holds between micro-batches: weights, their gradients and the optimizer's states."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def parameter_bytes(self) -> int:
        """The weights that compute."""
        return (self.num_parameters + self.num_frozen) * self.element_bytes

    @property
    def gradient_bytes(self) -> int:
        """Gradient sums of all weights."""
        return self.num_parameters * self._wide

    @property
    def optimizer_bytes(self) -> int:
        """This rank's shard: two moments, and master weights where parameters are narrower.

        Gradients are reduced in place.
        """
        copies = 2 + int(self.element_bytes < self._wide)
        return copies * self._wide * -(-self.num_parameters // self.num_ranks)

    @property
    def _wide(self) -> int:
        return max(4, self.element_bytes)
