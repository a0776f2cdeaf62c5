"""Losses that only sums over the whole global batch define, such as the load balance of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from bytescale.runtime.mesh import Mesh


@runtime_checkable
class HasBatchLoss(Protocol):
    """What a model with such a loss offers beside ``TrainableModel``. Every rank calls the first three once a step.

    The model gathers whatever it needs of its tokens during forward and backward; the runtime adds up ``batch_sums``
    over ranks in one collective after the last backward. Gradients that ``batch_loss`` makes are this rank's part, and
    are summed over ranks with all others.
    """

    def begin_batch(self) -> None:
        """Before the first forward: forget the step before."""
        ...

    def batch_sums(self) -> Tensor | None:
        """fp64, of the same shape on every rank, zeros on one without tokens; None on all ranks: no such loss."""
        ...

    def batch_loss(self, total: Tensor) -> Tensor:
        """Scalar, the same on every rank, from the sum of all ranks' ``batch_sums``."""
        ...

    def batch_parameters(self) -> Sequence[nn.Parameter]:
        """All parameters that ``batch_loss`` has a gradient for; none when there is no such loss."""
        ...


def begin_batch_loss(model: object) -> None:
    """Before a step's first forward."""
    if isinstance(model, HasBatchLoss):
        model.begin_batch()


def finish_batch_loss(model: object, mesh: Mesh) -> float:
    """After a step's last backward: adds the loss's gradient to this rank's; returns its value, 0 where there is none.

    One all-reduce over the ranks with the same layers, and none for models without such a loss. (Tensor-parallel ranks
    have each its tokens at the routers: theirs are added up too.)
    """
    if not isinstance(model, HasBatchLoss):
        return 0.0
    sums = model.batch_sums()
    if sums is None:
        return 0.0
    loss = model.batch_loss(mesh.tp.all_reduce(mesh.hdp.all_reduce(sums)))
    if loss.requires_grad:  # not on a rank without tokens
        loss.backward()
    return float(loss.detach())
