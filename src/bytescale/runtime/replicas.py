"""Parameters that several ranks of a mesh use: their gradients are summed where the HDP group alone does not do it.

* Norms and routers on tensor-parallel ranks, which saw different tokens; and, with fewer key/value heads than ranks,
  projections of the same head (``Cut.replicas``).
* The embedding that is the output head too, when the first and the last pipeline stage are different ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytescale.runtime.flat import FlatParameters
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh


def sum_replicas(parameters: FlatParameters, tp: RankGroup) -> None:
    """Add up, over the tensor-parallel ranks that hold the same part, the gradients of replicated parameters.

    One all-reduce. Every rank gets the same bits, hence replicas stay equal.
    """
    shared = [entry for entry in parameters.entries if entry.cut.replicas > 1]
    if not shared:
        return
    # Ranks with different parts of a parameter add zeros to each other's.
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
    """One matrix as embedding on the first stage, which owns it, and as output head on the last, which borrows it.

    The owner alone has it in its optimizer and in checkpoints: two copies that are updated apart could drift.
    """

    def __init__(self, mesh: Mesh, weight: Tensor, gradient: Tensor) -> None:
        """``weight, gradient``: contiguous, the owner's, or the borrower's copy and its gradient sum. Same shapes."""
        self.mesh = mesh
        self.weight = weight
        self.gradient = gradient

    def bring_gradient_home(self) -> None:
        """The borrower's gradient sum goes to the owner, who adds it to its own."""
        if self._owns:
            borrowed = torch.empty_like(self.gradient)
            self._move(self.mesh.backward[0], receive=borrowed)
            self.gradient += borrowed
        else:
            self._move(self.mesh.backward[0], send=self.gradient)
            self.gradient.zero_()

    def lend(self) -> None:
        """The owner's weight goes to the borrower: after every update."""
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
