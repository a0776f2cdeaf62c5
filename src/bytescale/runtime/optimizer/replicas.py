"""Sums the gradients of parameters that several ranks of a mesh use, where the sum over the HDP group is not enough.

* Norms and routers are replicated on tensor-parallel ranks, which see different tokens. With fewer key/value heads than
  ranks, so are the projections of a head (``Cut.replicas``).
* A tied embedding is also the output head. With pipeline stages, the first and the last stage are different ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import FlatParameters


def sum_replicas(parameters: FlatParameters, tp: RankGroup) -> None:
    """Sum the gradients of replicated parameters over their tensor-parallel ranks, all of which get the same bits."""
    shared = [entry for entry in parameters.entries if entry.cut.replicas > 1]
    if not shared:
        return
    # A rank leaves zeros in the places of the parts that it does not hold.
    sizes = [entry.cut.count * (entry.stop - entry.start) for entry in shared]
    total = parameters.gradients.new_zeros(sum(sizes))
    pieces = [
        piece.view(entry.cut.count, -1)[entry.cut.index]
        for entry, piece in zip(shared, total.split(sizes), strict=True)
    ]
    for entry, piece in zip(shared, pieces, strict=True):
        piece.copy_(parameters.gradient_of(entry).view(-1))
    tp.all_reduce(total)
    for entry, piece in zip(shared, pieces, strict=True):
        parameters.gradient_of(entry).view(-1).copy_(piece)


class TiedHead:
    """One matrix that is the embedding on the first stage and the output head on the last stage.

    The first stage owns the matrix, and the last stage borrows it. Only the owner has it in its optimizer and in
    checkpoints: two copies that are updated separately could drift apart.
    """

    def __init__(self, mesh: Mesh, weight: Tensor, gradient: Tensor) -> None:
        """``weight, gradient``: contiguous, of the same shape on both stages; the borrower's are its own copies."""
        self.mesh = mesh
        self.weight = weight
        self.gradient = gradient

    def bring_gradient_home(self) -> None:
        """Send the borrower's gradient sum to the owner, which adds it to its own."""
        if self._owns:
            borrowed = torch.empty_like(self.gradient)
            self._move(self.mesh.backward[0], receive=borrowed)
            self.gradient += borrowed
        else:
            self._move(self.mesh.backward[0], send=self.gradient)
            self.gradient.zero_()

    def lend(self) -> None:
        """Send the owner's weight to the borrower. Called after every update."""
        if self._owns:
            self._move(self.mesh.forward[0], send=self.weight)
        else:
            self._move(self.mesh.forward[0], receive=self.weight)

    @property
    def _owns(self) -> bool:
        return self.mesh.stage == 0

    def _move(self, group: RankGroup, send: Tensor | None = None, receive: Tensor | None = None) -> None:
        peer = self.mesh.shape.pp - 1 if self._owns else 0
        group.exchange.start(send=send, to=peer, receive=receive, source=peer, tag=0).wait()
