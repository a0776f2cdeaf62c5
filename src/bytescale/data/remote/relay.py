"""The relay actor: one answer of the planner for a node, cut into its ranks' parts. Requests climb a tree of relays.

There is a relay on each node of several; ranks of a single node ask the planner itself. With 8 ranks a node and
``FAN_OUT`` relays below each, 16,384 ranks are 64 requests a step for the planner.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import ray.exceptions

from bytescale.data.batches import SamplerState
from bytescale.data.remote.slices import PlannedStep, RankStep, StepReference, StillReading

Answer = StepReference | StillReading | None
RankAnswer = RankStep | StillReading | None

FAN_OUT = 64


def above(node: int) -> int | None:
    """Number of the node whose relay that of ``node`` asks; None: it asks the planner."""
    return None if node < FAN_OUT else (node - FAN_OUT) // FAN_OUT


def _is_good(answer: Answer, state: SamplerState, lost: str) -> bool:
    """Whether an answer is the step: anything else is asked about again, as the reason may be gone."""
    return isinstance(answer, StepReference) and answer.life != lost and answer.state_before == state


async def part_of(ask: Callable[[SamplerState, str], Awaitable[Answer]], rank: int, state: SamplerState) -> RankAnswer:
    """The part of ``rank`` in the step that starts at ``state``, cut from what ``ask`` (``PlannerActor.plan``) says."""
    lost = ""
    while isinstance(answer := await ask(state, lost), StepReference):
        try:
            planned: PlannedStep = await answer.planned
        except ray.exceptions.ObjectLostError:  # it went with the planner that had made it
            lost = answer.life
        else:
            return RankStep.of(planned, rank, answer)
    return answer


class Relay:
    """Keeps the last answers, and how to plan: a planner that was restarted is told again."""

    def __init__(self, find_above: Callable[[], Any], kept_steps: int) -> None:
        """Asks nobody yet.

        Args:
            find_above: finds the actor that is asked, the planner or another relay: both ``plan`` and ``configure``.
            kept_steps: answers that are kept.
        """
        self._find_above = find_above
        self._kept_steps = kept_steps
        self._actor: Any = None
        self._how_to_plan: tuple[Any, int | None] | None = None
        self._answers: dict[int, asyncio.Task[Answer]] = {}

    async def configure(self, planner: Any, stop_step: int | None) -> None:
        """As ``PlannerActor.configure``: remembered, for a planner that asks."""
        self._how_to_plan = (planner, stop_step)

    async def plan(self, state: SamplerState, lost: str = "") -> Answer:
        """As ``PlannerActor.plan``; those who ask for the same step share one request."""
        step = int(state["step"])
        known = self._answers.get(step)
        if known is not None:
            came_in_time = not known.done()
            answer = await self._outcome(known)
            if came_in_time and isinstance(answer, StillReading):
                return answer  # fresh: a request of one's own would take as long again
            if not _is_good(answer, state, lost) and self._answers.get(step) is known:
                del self._answers[step]
        if step not in self._answers:
            self._answers[step] = asyncio.create_task(self._ask(state, lost))
            for old in [old for old in self._answers if old < step - self._kept_steps]:
                del self._answers[old]
        return await asyncio.shield(self._answers[step])

    async def part(self, rank: int, state: SamplerState) -> RankAnswer:
        """As ``PlannerActor.part``."""
        return await part_of(self.plan, rank, state)

    async def pid(self) -> int:
        """Of the process that this relay lives in."""
        return os.getpid()

    async def _outcome(self, known: Awaitable[Answer]) -> Answer:
        """What a request came to; None where it failed."""
        try:
            return await asyncio.shield(known)
        except Exception:
            return None

    async def _ask(self, state: SamplerState, lost: str) -> Answer:
        if self._actor is None:
            self._actor = self._find_above()
        while (answer := await self._actor.plan.remote(state, lost)) is None:
            if self._how_to_plan is None:
                return None
            await self._actor.configure.remote(*self._how_to_plan)
        return answer
