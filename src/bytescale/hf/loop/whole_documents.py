"""Whole documents of a micro-batch, from the rows that its ranks have.

Of documents that ranks share, every member gets the rows of all members, in a ring of messages over the communicator
that attention uses. Each computes the loss of the whole documents, and backward keeps the gradient of its own rows,
without a message: together the members have every row's gradient once. The value of a loss is counted by the group's
first member alone. All members send at the same place of the same micro-batch, between its forward and its backward,
and so before the rank's reductions (``plan.last_message``). A send and its receive are one operation, as NCCL requires.

Shape letters: T rows of a micro-batch, P of them of shared documents; D documents of the micro-batch, S tokens of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bytescale.attention import Exchange
from bytescale.attention.copies import to_device
from bytescale.attention.rings.messages import Kind
from bytescale.common.errors import PlanError
from bytescale.hf.batch.documents import of_documents
from bytescale.plan import MicroBatch
from bytescale.plan.plan import concatenated_ranges
from bytescale.plan.rank_plan import SharedGroup


class WholeDocuments(Sequence[Tensor]):
    """``[D]`` tensors ``[S, ...]``: of each document of a micro-batch, the values of all its tokens, in their order.

    A gradient may flow through them. All members of a group have the documents that they share, and compute the same
    loss. So add losses up by ``sum``, which counts the value of each document once over all ranks.

    Attributes:
        numbers: ``[D]`` places of the documents in the global batch.
        counted: ``[D]`` whether this rank counts the document, which one rank does.
    """

    def __init__(self, plan: MicroBatch, values: Tensor, exchange: Exchange, *, is_counted: bool = True) -> None:
        """``values [T, ...]``: of all rows. Every member of the shared group calls it at the same place.

        ``is_counted``: by this rank, or by another tensor-parallel rank, which has the same documents.
        """
        shared, num_shared = plan.shared, plan.num_shared_tokens
        self.numbers = plan.documents
        self.counted = [is_counted] * len(plan.local_lengths)
        self._values = list(values[num_shared:].split(plan.local_lengths.tolist()))
        if shared is not None:
            whole: Tensor = _Gathered.apply(values[:num_shared], shared, exchange)
            self.counted = [is_counted and shared.member == 0] * len(shared.sequences) + self.counted
            self._values = [*whole.split(shared.lengths.tolist()), *self._values]
        if plan.trees is not None:
            places = plan.trees.sequence_of.tolist()
            self.counted = [self.counted[place] for place in places]
            self._values = of_documents(plan.trees, self._values)
        self._index = plan.index
        self._rows = values

    def of(self, number: int) -> Tensor:
        """``[S, ...]`` of the document at this place of the global batch. Raises ``PlanError`` if it is elsewhere."""
        if number not in self.numbers:
            raise PlanError(
                f"document {number} is not in micro-batch {self._index}, which has documents {self.numbers}",
                so="a loss that looks at documents of several micro-batches cannot be computed in one of them",
                fix="use hdp.backward(batch, loss, together=...), which brings such documents together",
            )
        return self._values[self.numbers.index(number)]

    def sum(self, losses: Tensor | Sequence[Tensor]) -> Tensor:
        """The sum of ``losses [D]``: its value is over the documents that this rank counts, its gradient over all.

        So the values of all ranks add up to that of one process, and so do the gradients of the model. Parameters of
        the loss itself, such as a scale, belong before ``micro.documents``: they would get one gradient per member.
        """
        if not isinstance(losses, Tensor):
            losses = torch.stack(list(losses)) if len(losses) else self._rows.new_zeros(0)
        if losses.shape != (len(self),):
            raise PlanError(
                f"sum() got losses of shape {list(losses.shape)}, and the micro-batch has {len(self)} documents",
                so="documents that several ranks share could not be counted once",
                fix="give one loss for each document, in the order of micro.documents(...)",
            )
        # A rank without a row of these documents takes part in their backward all the same.
        anchor = self._rows[:0].sum()
        counted = to_device(torch.tensor(self.counted, dtype=torch.bool), losses.device)
        return torch.where(counted, losses, losses - losses.detach()).sum() + anchor

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, place: Any) -> Any:
        return self._values[place]


class _Gathered(torch.autograd.Function):
    """From this member's rows ``[P, ...]`` to those of all members, document by document. Backward keeps its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shared: SharedGroup, exchange: Exchange) -> Tensor:
        places = [to_device(torch.as_tensor(own), rows.device) for own in _places(shared)]
        ctx.own = places[shared.member]
        whole = rows.new_empty(int(shared.lengths.sum()), *rows.shape[1:])
        held, member = rows.contiguous(), shared.member
        whole[ctx.own] = held
        for _ in range(shared.size - 1):
            # The rows that came last go on to the next member, and those of one member further back arrive.
            member = (member - 1) % shared.size
            arriving = rows.new_empty(len(places[member]), *rows.shape[1:])
            exchange.start(
                send=held,
                to=shared.ranks[(shared.member + 1) % shared.size],
                receive=arriving,
                source=shared.ranks[shared.member - 1],
                tag=Kind.DOCUMENT_ROWS.tag(shared.group),
            ).wait()
            whole[places[member]] = held = arriving
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0][ctx.own], None, None


def _places(shared: SharedGroup) -> list[np.ndarray]:
    """For each member, where its rows lie in all shared documents, one behind the other."""
    starts = np.cumsum(shared.lengths) - shared.lengths
    members = shared.bounds + starts[:, None, None]
    return [concatenated_ranges(bounds[:, :, 0].ravel(), bounds[:, :, 1].ravel()) for bounds in members]
