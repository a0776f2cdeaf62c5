"""Messages between pipeline stages: activations forward and their gradients backward. The plan gives their shapes.

Messages are posted only between two actions, at the places that ``plan.schedule.messages`` gives. This keeps a pipeline
from hanging under NCCL, where a call inside an action (a new allocation, the first use of a kernel) may wait for all
work that its device has been given, including messages. ``plan.schedule.messages`` has the proof.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from bytescale.attention.rings.exchange import Transfer
from bytescale.plan import RankPlan
from bytescale.plan.schedule import Message, messages, stage_actions
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.token_shards import own_rows

Action = tuple[int, int]
"""(1 for a backward or 0 for a forward, micro-batch): a row of ``plan.schedule.stage_actions``."""


def run_stage(
    links: StageLinks,
    forward: Callable[[int, Tensor | None], Tensor],
    around: Callable[[Action], AbstractContextManager[None]],
    behind_backward: Callable[[], None],
) -> None:
    """Run the forwards and backwards of a step on this stage, and exchange with its neighbours what they make.

    Without gradients the order is that of a training step, which cannot hang; messages of backward carry zeros.

    Args:
        forward: from the number of a micro-batch, and the output ``[t, C]`` of the stage before (None: it is the first
            one), to this stage's output; on the last stage to the loss, a scalar.
        around: makes the context of each forward and backward. A wait for another stage is outside.
    """
    held: dict[int, tuple[Tensor | None, Tensor | None]] = {}  # input and output of each forward, until its backward
    trains = torch.is_grad_enabled()

    def made_by(action: Action, received: Tensor | None) -> Tensor | None:
        is_backward, index = action
        if not is_backward:
            output = forward(index, None if received is None else received.requires_grad_(trains))
            held[index] = received, output if trains else None
            return None if links.mesh.is_last_stage else output.detach()
        given, kept = held.pop(index)
        if kept is not None:
            kept.backward(received)
            behind_backward()
        if given is None:
            return None
        return torch.zeros_like(given) if given.grad is None else given.grad

    links.exchange(0)
    for place, action in enumerate(links.actions):
        received = links.receive(place)
        with around(action):
            made = made_by(action, received)
        links.exchange(place + 1, made)
    links.finish()


class StageLinks:
    """One stage's messages in one step.

    Attributes:
        actions: what this stage runs, in order. The *place* of an action is its number in this order.
    """

    def __init__(self, mesh: Mesh, rank_plan: RankPlan, width: int, dtype: torch.dtype) -> None:
        """``width``: channels C of the residual stream."""
        self.mesh = mesh
        self.rank_plan = rank_plan
        self.width, self.dtype = width, dtype
        own = (len(rank_plan.micro_batches), mesh.shape.pp, mesh.stage)
        self.actions: list[Action] = [(backward, index) for backward, index in stage_actions(*own).tolist()]
        self._due: dict[int, list[Message]] = defaultdict(list)
        for message in messages(*own):
            self._due[message.posted_before].append(message)
        self._outgoing = {
            message.made_at: message
            for stage in (mesh.stage - 1, mesh.stage + 1)
            if 0 <= stage < mesh.shape.pp
            for message in messages(*own[:2], stage)
            if message.maker == mesh.stage
        }
        self._coming: dict[int, tuple[Message, Transfer, Tensor]] = {}  # by the place of the action that takes it
        self._sent: list[tuple[Message, Transfer]] = []

    def exchange(self, place: int, made: Tensor | None = None) -> None:
        """Post the messages that are due just before the action at ``place``: one send at most, and the receives.

        Everything is allocated before anything is posted, because an allocation may wait for what has been posted.
        ``made``: ``[t, C]`` output or gradient of the previous action; None at the ends of the model.
        """
        due = self._due.get(place, [])
        counts = [self.rank_plan.micro_batches[message.micro_batch].num_tokens for message in due]
        shapes = [(len(own_rows(count, self.mesh.tp)), self.width) for count in counts]
        buffers = [torch.empty(shape, dtype=self.dtype, device=self.mesh.hdp.device) for shape in shapes]
        if made is not None:
            message, rows = self._outgoing[place - 1], made.contiguous()
            transfer = self._group(message).exchange.start(
                send=rows, to=message.taker, receive=None, source=message.taker, tag=self._tag(message)
            )
            self._sent.append((message, transfer))
        for message, rows in zip(due, buffers, strict=True):
            transfer = self._group(message).exchange.start(
                send=None, to=message.maker, receive=rows, source=message.maker, tag=self._tag(message)
            )
            self._coming[message.taken_at] = message, transfer, rows

    def receive(self, place: int) -> Tensor | None:
        """Wait for the input of the forward, or the gradient of the output, ``[t, C]``; None if no stage sends it."""
        if place not in self._coming:
            return None
        message, transfer, rows = self._coming.pop(place)
        transfer.wait()
        self._let_go(message)
        return rows

    def finish(self) -> None:
        for _, transfer in self._sent:
            transfer.wait()
        self._sent.clear()

    def _let_go(self, received: Message) -> None:
        """Free the sent tensors that have certainly arrived: the maker of ``received`` used them before it sent."""
        kept = []
        for message, transfer in self._sent:
            if message.taker == received.maker and message.taken_at <= received.made_at:
                transfer.wait()
            else:
                kept.append((message, transfer))
        self._sent = kept

    def _group(self, message: Message) -> RankGroup:
        groups = self.mesh.backward if message.backward else self.mesh.forward
        return groups[message.boundary % 2]

    def _tag(self, message: Message) -> int:
        return message.micro_batch * self.mesh.shape.pp + message.boundary
