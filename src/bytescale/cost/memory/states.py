"""What a device holds between micro-batches: weights, their gradients and the optimizer's states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


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
    """Ranks that share the weights of layers (``runtime.optimizer.units``)."""
    trained_of_layers: tuple[int, ...] = ()
    """For each layer that they share, how many of ``num_parameters`` are in it."""
    frozen_of_layers: tuple[int, ...] = ()
    """The same of ``num_frozen``."""

    @property
    def parameter_bytes(self) -> int:
        """The weights that compute: a rank's part of the layers, and two neighbouring layers that are open."""
        layers = [sum(both) for both in zip(self.trained_of_layers, self.frozen_of_layers, strict=True)]
        return self._held(self.num_parameters + self.num_frozen, layers) * self.element_bytes

    @property
    def gradient_bytes(self) -> int:
        """Gradient sums of all weights that are trained, likewise."""
        return self._held(self.num_parameters, self.trained_of_layers) * self._wide

    def _held(self, total: int, of_layers: Sequence[int]) -> int:
        """Of ``total`` weights, how many a rank has at a time."""
        if self.domain == 1:
            return total
        most = max((a + b for a, b in pairwise(of_layers)), default=sum(of_layers))
        return total - sum(of_layers) + sum(-(-own // self.domain) for own in of_layers) + most

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
