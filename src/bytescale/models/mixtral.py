"""Mixtral: the Llama decoder with a mixture of experts in place of each feed-forward block.

Shape letters: T tokens, C hidden size, E experts, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from bytescale.config.architecture import Architecture
from bytescale.models.balance import BalanceLoss
from bytescale.models.llama import Llama
from bytescale.models.moe import MixtureOfExperts


class Mixtral(Llama):
    """A Llama whose layers are sparse. Fits ``runtime.HasBatchLoss``: see ``models.balance``."""

    def __init__(self, shape: Architecture, layers: range | None = None) -> None:
        super().__init__(shape, layers)
        mixtures = [module for module in self.modules() if isinstance(module, MixtureOfExperts)]
        balanced = [(mixture.balance, mixture.router) for mixture in mixtures if mixture.balance is not None]
        self._balance = BalanceLoss(shape, balanced) if balanced else None

    def make_feed_forward(self) -> nn.Module:
        return MixtureOfExperts(self.shape)

    def begin_batch(self) -> None:
        """Forget the previous step. Called before a step's first forward."""
        if self._balance is not None:
            self._balance.reset()

    def batch_sums(self) -> Tensor | None:
        """This rank's sums for the load-balancing loss, fp64; None when that loss is off."""
        return None if self._balance is None else self._balance.sums()

    def batch_loss(self, total: Tensor) -> Tensor:
        """The weighted loss from all ranks' sums. Its gradient is this rank's part."""
        if self._balance is None:
            raise RuntimeError("batch_loss() of a model whose router_aux_loss_weight is 0")
        return self._balance.loss(total)

    def batch_parameters(self) -> Sequence[nn.Parameter]:
        """The weights of the routers: the load-balancing loss acts on them alone."""
        return [] if self._balance is None else [router.weight for _, router in self._balance.layers]
