"""Losses that are defined on sums over the whole global batch, such as the load balance of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from bytescale.runtime.mesh import Mesh


@runtime_checkable
class HasBatchLoss(Protocol):
    """What a model with such a loss offers in addition to ``DecoderModule``; called once a step, by every rank.

    The gradients that ``batch_loss`` makes are this rank's part: they are summed over ranks with all others.
    """

    def begin_batch(self) -> None:
        """Forget the previous step. Called before the first forward."""
        ...

    def batch_sums(self) -> Tensor | None:
        """This rank's sums, fp64, of the same shape on every rank; a rank without tokens returns zeros.

        None, on all ranks alike, means that the model has no such loss.
        """
        ...

    def batch_loss(self, total: Tensor) -> Tensor:
        """The loss, a scalar that is the same on every rank. ``total`` is the sum of all ranks' ``batch_sums``."""
        ...

    def batch_parameters(self) -> Sequence[nn.Parameter]:
        """All parameters for which ``batch_loss`` has a gradient; empty when there is no such loss."""
        ...


def finish_batch_loss(model: object, mesh: Mesh) -> float:
    """Add the gradient of the batch loss to this rank's gradients. Called after a step's last backward.

    Returns the value of the loss; 0, without a collective, for a model that has none. At the routers every
    tensor-parallel rank has tokens of its own, so the sums are added up over tensor-parallel ranks too.
    """
    if not isinstance(model, HasBatchLoss) or (sums := model.batch_sums()) is None:
        return 0.0
    loss = model.batch_loss(mesh.tp.all_reduce(mesh.hdp.all_reduce(sums)))
    if loss.requires_grad:  # false on a rank without tokens
        loss.backward()
    return float(loss.detach())
