"""What travels between pipeline stages: activations forward, their gradients backward, shapes known from the plan.

Receives are posted one action ahead, so that a message travels while the action before it computes; sends are never
waited for, except where the peer is known to have what was sent. Hence a rank waits for nothing but what
``plan.pipeline_order`` says it waits for: its inputs, and the members of its shared groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bytescale.attention.exchange import Transfer
from bytescale.plan import MicroBatch
from bytescale.plan.schedule import stage_actions
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.token_shards import num_own_rows

Action = tuple[int, int, int]
"""Backward (0, 1), chunk, micro-batch: a row of ``plan.schedule.stage_actions``."""


class StageLinks:
    """One stage's messages in one step.

    Attributes:
        actions: what this stage runs, in order.
    """

    def __init__(
        self, mesh: Mesh, micro_batches: Sequence[MicroBatch], num_chunks: int, width: int, dtype: torch.dtype
    ) -> None:
        """``width``: channels C of the residual stream; ``num_chunks``: of layers, on every stage."""
        self.mesh = mesh
        self.micro_batches = micro_batches
        self.num_chunks = num_chunks
        self.width, self.dtype = width, dtype
        self._num_parts = mesh.shape.pp * num_chunks
        self.actions = self._actions_of(mesh.stage)
        self._places: dict[int, dict[Action, int]] = {}  # of other stages' actions
        self._coming: dict[Action, tuple[Transfer, Tensor]] = {}
        self._sent: list[tuple[int, Action, Transfer]] = []  # receiver, the action that wants it, the message

    def expect(self, actions: Sequence[Action]) -> None:
        """Post the receives of actions that come soon."""
        for action in actions:
            source = self._source(action)
            if source is None or action in self._coming:
                continue
            stage, group, _ = source
            tokens = self.micro_batches[action[2]].num_tokens
            rows = torch.empty(
                num_own_rows(tokens, self.mesh.tp), self.width, dtype=self.dtype, device=self.mesh.hdp.device
            )
            transfer = group.exchange.start(send=None, to=stage, receive=rows, source=stage, tag=self._tag(action))
            self._coming[action] = transfer, rows

    def receive(self, action: Action) -> Tensor | None:
        """``[t, C]`` input of a forward, or gradient of the output for a backward; None at the ends of the model."""
        source = self._source(action)
        if source is None:
            return None
        transfer, rows = self._coming.pop(action)
        transfer.wait()
        stage, _, made_by = source
        self._let_go(stage, made_by)
        return rows

    def send(self, action: Action, rows: Tensor) -> None:
        """Pass on what ``action`` has made; nothing at the ends of the model."""
        wanted_by = self._follower(action)
        if wanted_by is None:
            return
        stage, group, follower = wanted_by
        transfer = group.exchange.start(
            send=rows.contiguous(), to=stage, receive=None, source=stage, tag=self._tag(follower)
        )
        self._sent.append((stage, follower, transfer))

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for _, _, transfer in self._sent:
            transfer.wait()
        self._sent.clear()

    def _let_go(self, stage: int, made_by: Action) -> None:
        """A message made by an action of ``stage`` has come: that stage has all it needed for its actions before."""
        place = self._place(stage, made_by)
        kept = []
        for sent in self._sent:
            receiver, wanted_by, transfer = sent
            if receiver == stage and self._place(stage, wanted_by) <= place:
                transfer.wait()
            else:
                kept.append(sent)
        self._sent = kept

    def _source(self, action: Action) -> tuple[int, RankGroup, Action] | None:
        """Stage and action that make what ``action`` needs."""
        backward, chunk, index = action
        return self._neighbour(chunk, +1, 1, index) if backward else self._neighbour(chunk, -1, 0, index)

    def _follower(self, action: Action) -> tuple[int, RankGroup, Action] | None:
        """Stage and action that need what ``action`` makes."""
        backward, chunk, index = action
        return self._neighbour(chunk, -1, 1, index) if backward else self._neighbour(chunk, +1, 0, index)

    def _neighbour(self, chunk: int, offset: int, backward: int, index: int) -> tuple[int, RankGroup, Action] | None:
        part = chunk * self.mesh.shape.pp + self.mesh.stage + offset
        if not 0 <= part < self._num_parts:
            return None
        its_chunk, stage = divmod(part, self.mesh.shape.pp)
        boundary = min(part, part - offset) % self.mesh.shape.pp
        group = self.mesh.across(self.mesh.backward if backward else self.mesh.forward, boundary)
        return stage, group, (backward, its_chunk, index)

    def _tag(self, receiver: Action) -> int:
        return receiver[2] * self.num_chunks + receiver[1]

    def _actions_of(self, stage: int) -> list[Action]:
        rows = stage_actions(len(self.micro_batches), self.mesh.shape.pp, stage, self.num_chunks)
        return [(backward, chunk, index) for backward, chunk, index in rows.tolist()]

    def _place(self, stage: int, action: Action) -> int:
        if stage not in self._places:
            self._places[stage] = {action: place for place, action in enumerate(self._actions_of(stage))}
        return self._places[stage][action]
