"""The relay actor. It asks the planner once for all ranks of its node, and cuts each rank's part from the answer.

If there are several nodes, each has a relay. On a single node, the ranks ask the planner itself. Relays form a tree:
the first ``FAN_OUT`` relays ask the planner, and each of the others asks a relay above it, which answers ``FAN_OUT`` of
them. So with 8 ranks a node, 16,384 ranks cause 64 requests to the planner per step.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import ray.exceptions

from bytescale.data.order.batches import SamplerState
from bytescale.data.remote.messages import PlannedStep, RankStep, StepReference, StillReading

Answer = StepReference | StillReading | None
RankAnswer = RankStep | StillReading | None

FAN_OUT = 64


def above(node: int) -> int | None:
    """Return the number of the node whose relay the relay of ``node`` asks; None: it asks the planner."""
    return None if node < FAN_OUT else (node - FAN_OUT) // FAN_OUT


def _is_good(answer: Answer, state: SamplerState, costs: Any, lost: str) -> bool:
    """Return whether ``answer`` is the step that was asked for and its object was not ``lost``.

    Otherwise the relay asks again, because the reason may be gone.
    """
    return isinstance(answer, StepReference) and answer.life != lost and answer.answers(state, costs)


async def part_of(
    ask: Callable[[SamplerState, Any, str], Awaitable[Answer]], rank: int, state: SamplerState, costs: Any
) -> RankAnswer:
    """Return the part of ``rank`` in the step that starts at ``state``, planned with ``costs``.

    It is cut from the answer of ``ask``, which has the arguments and answers of ``PlannerActor.plan``.
    """
    lost = ""
    while isinstance(answer := await ask(state, costs, lost), StepReference):
        try:
            planned: PlannedStep = await answer.planned
        except ray.exceptions.ObjectLostError:  # the object was lost with the planner that had made it
            lost = answer.life
        else:
            return RankStep.of(planned, rank, answer)
    return answer


class Relay:
    """Keeps the last answers. It also keeps how to plan, and tells a planner that was restarted."""

    def __init__(self, find_above: Callable[[], Any], kept_steps: int) -> None:
        """Ask nobody yet.

        Args:
            find_above: finds the actor to ask, which is the planner or another relay. Both have the methods ``plan``
                and ``configure``.
            kept_steps: number of answers that are kept.
        """
        self._find_above = find_above
        self._kept_steps = kept_steps
        self._actor: Any = None
        self._how_to_plan: tuple[Any, int | None] | None = None
        self._answers: dict[int, asyncio.Task[Answer]] = {}

    async def configure(self, planner: Any, stop_step: int | None) -> None:
        """Remember how to plan, as ``PlannerActor.configure``, until the planner needs to be told."""
        self._how_to_plan = (planner, stop_step)

    async def plan(self, state: SamplerState, costs: Any = None, lost: str = "") -> Answer:
        """Answer as ``PlannerActor.plan``. All who ask for the same step share one request."""
        step = int(state["step"])
        known = self._answers.get(step)
        if known is not None:
            came_in_time = not known.done()
            answer = await self._outcome(known)
            if came_in_time and isinstance(answer, StillReading):
                return answer  # this answer is new: another request would only wait as long again
            if not _is_good(answer, state, costs, lost) and self._answers.get(step) is known:
                del self._answers[step]
        if step not in self._answers:
            self._answers[step] = asyncio.create_task(self._ask(state, costs, lost))
            for old in [old for old in self._answers if old < step - self._kept_steps]:
                del self._answers[old]
        return await asyncio.shield(self._answers[step])

    async def part(self, rank: int, state: SamplerState, costs: Any = None) -> RankAnswer:
        """Answer as ``PlannerActor.part``."""
        return await part_of(self.plan, rank, state, costs)

    async def pid(self) -> int:
        """Return the id of the process that this relay lives in."""
        return os.getpid()

    async def _outcome(self, known: Awaitable[Answer]) -> Answer:
        """Return the answer to a request, or None if the request failed."""
        try:
            return await asyncio.shield(known)
        except Exception:
            return None

    async def _ask(self, state: SamplerState, costs: Any, lost: str) -> Answer:
        if self._actor is None:
            self._actor = self._find_above()
        while (answer := await self._actor.plan.remote(state, costs, lost)) is None:
            if self._how_to_plan is None:
                return None
            await self._actor.configure.remote(*self._how_to_plan)
        return answer
