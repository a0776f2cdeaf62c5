"""An embedding that is the head, too, in a pipeline: the first stage owns it, and the last one has a copy.

The copy's gradient travels to the owner at the end of a step, and the owner's weights to the copy before a pass. So
there is one optimizer state, and no bits that could drift. Both are messages between the ends of one pipeline, for one
tensor-parallel rank's words: the last stage sends the gradient after all its other messages, and the owner adds it
before its late parameters, of which an embedding is one, are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bytescale.attention import Exchange
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.zero import ZeroShards

_TAG = 2**30  # no micro-batch has it


class TiedHead:
    """The same on both stages; stages between them have none."""

    def __init__(self, mesh: Mesh, weight: nn.Parameter, owner: FlatParameters, wait: Callable[[], None]) -> None:
        """``owner``: of the first stage's parameters. ``wait``: returns when the owner's weights are up to date."""
        self._mesh, self._wait, self._weight = mesh, wait, weight
        self._is_owner = mesh.stage == 0
        self._flat = owner if self._is_owner else FlatParameters([("the copy of a tied embedding", weight)], 1)
        entry = next(entry for entry, own in self._flat.held_entries() if own is weight)
        self._value, self._gradient = self._flat.value_of(entry), self._flat.gradient_of(entry)
        if not self._is_owner:
            self._flat.zero_gradients()

    @staticmethod
    def of(mesh: Mesh, weight: nn.Parameter | None, zeros: Sequence[ZeroShards]) -> TiedHead | None:
        """What keeps a tied ``weight`` one. None where it is None, or not trained. ``zeros``: all that is trained."""
        if weight is None or not weight.requires_grad:
            return None
        holds = (zero for zero in zeros if any(own is weight for own in zero.parameters.parameters))
        owner = next(holds, zeros[0])  # the last stage has a copy alone
        return TiedHead(mesh, weight, owner.parameters, owner.collectives.wait_for_parameters)

    def send_weights(self) -> None:
        """From the owner to the copy; before the first forward of a step, on both."""
        if self._is_owner:
            self._wait()
        self._message(self._mesh.forward[0].exchange, self._value, from_owner=True)

    def add_gradient(self) -> None:
        """Add the gradient of the copy to the owner's; after the last backward of a step, on both."""
        exchange = self._mesh.backward[0].exchange
        if self._is_owner:
            arrived = torch.empty_like(self._gradient)
            self._message(exchange, arrived, from_owner=False)
            self._flat.collect_gradients()
            self._flat.add_gradient(self._weight, arrived)
        else:
            self._flat.collect_gradients()
            self._message(exchange, self._gradient, from_owner=False)
            self._flat.zero_gradients()

    def _message(self, exchange: Exchange, rows: Tensor, *, from_owner: bool) -> None:
        peer = self._mesh.shape.pp - 1 if self._is_owner else 0
        sends = self._is_owner == from_owner
        exchange.start(
            send=rows if sends else None, to=peer, receive=None if sends else rows, source=peer, tag=_TAG
        ).wait()
