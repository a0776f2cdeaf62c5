"""The client in a training rank. It asks for the rank's part of each planned step, and for the tokens of that part."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bytescale.data.loading.loader import LoaderTimes, PrefetchedSteps, StepData
from bytescale.data.order.batches import SamplerState
from bytescale.data.remote.calls import no_answer, wait_for
from bytescale.data.remote.messages import RankStep, SegmentTable, ServerSlices, StillReading, assemble
from bytescale.data.remote.relay import RankAnswer
from bytescale.plan import Planner
from bytescale.plan.plan import StepPlanner, costs_of_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DataService:
    """The actors that a client asks."""

    relay: Any
    """Handle of the ``Relay`` of this node, or of the ``PlannerActor`` itself."""
    servers: Sequence[Any]
    """Handles of the ``DataServer`` actors, in order."""
    further_fields: tuple[str, ...] = ()
    """The names of ``data.fields``."""
    answer_seconds: float
    """How long an actor may take to answer, its restarts included. After that the client gives up."""


class RemoteLoader(PrefetchedSteps):
    """Fetches the steps of one rank from the actors of the remote loader."""

    def __init__(
        self,
        service: DataService,
        *,
        planner: Planner,
        rank: int,
        state: SamplerState,
        stop_step: int | None,
        prefetch_steps: int,
    ) -> None:
        """Start fetching at ``state``.

        Args:
            service: the actors to ask.
            planner: function from lengths to a plan. It is sent to the planner actor, and again after each restart.
                If it is a ``StepPlanner``, each request for a step carries the costs of that step.
            rank: HDP rank.
            state: where the first step starts.
            stop_step: the iteration ends before the step of this number; None: it has no end.
            prefetch_steps: finished steps that may wait, at least 1.
        """
        self._relay = service.relay
        self._servers = service.servers
        self._further_fields = service.further_fields
        self._answer_seconds = service.answer_seconds
        self._planner = planner
        self._rank = rank
        self._state = state
        self._stop_step = stop_step
        self._lives: dict[str, set[str]] = {}
        super().__init__(self._fetch_steps(), prefetch_steps, name="bytescale-client")

    def _fetch_steps(self) -> Iterator[StepData]:
        state, asked = self._state, None
        while self._wants(state):
            # 1. Get this rank's part of the plan.
            part = self._part(state, asked)
            started = time.perf_counter()
            early = self._wants(part.state_after) and self._knows(part.state_after)
            asked = self._ask(part.state_after) if early else None
            # 2. Call each server that has tokens of this part once, all servers at the same time.
            answers = self._fetch(part.segments)
            micro_batches = assemble(part.rank_plan, part.segments, answers, self._further_fields)
            num_bytes = sum(answer.num_bytes for answer in answers.values())
            yield StepData(
                step=part.step,
                num_targets=part.num_targets,
                loss_divisor=part.loss_divisor,
                summary=part.summary,
                plan=part.plan,
                rank_plan=part.rank_plan,
                micro_batches=micro_batches,
                sampler_state_after=part.state_after,
                times=LoaderTimes(
                    planning_seconds=part.planning_seconds,
                    reading_seconds=time.perf_counter() - started,
                    bytes_read=num_bytes,
                    bytes_received=num_bytes + part.num_bytes,
                    steps_planned=part.steps_planned,
                    restarts=sum(len(lives) - 1 for lives in self._lives.values()),
                ),
            )
            state = part.state_after

    def _wants(self, state: SamplerState) -> bool:
        return self._stop_step is None or state["step"] < self._stop_step

    def _knows(self, state: SamplerState) -> bool:
        """Whether the costs of the step are known, so that its plan can be asked for."""
        return not isinstance(self._planner, StepPlanner) or self._planner.knows(state["step"])

    def _ask(self, state: SamplerState) -> Any:
        return self._relay.part.remote(self._rank, state, costs_of_step(self._planner, state["step"]))

    def _part(self, state: SamplerState, asked: Any) -> RankStep:
        """Return this rank's part of the step that starts at ``state``.

        A planner that was restarted does not know how to plan, and is told here. ``asked`` is the request for the part
        if it was sent already, while the tokens of the step before were read.
        """
        who = "the planner actor"
        deadline = time.monotonic() + self._answer_seconds
        while time.monotonic() < deadline:
            answer: RankAnswer = wait_for(asked or self._ask(state), who, self._answer_seconds)
            asked = None
            if isinstance(answer, RankStep):
                self._alive("planner", answer.life)
                return answer
            if isinstance(answer, StillReading):
                self._say_still_reading(state, answer)
                deadline = time.monotonic() + self._answer_seconds
            else:
                wait_for(
                    self._relay.configure.remote(self._planner, self._stop_step),
                    who,
                    self._answer_seconds,
                )
        raise no_answer(who, self._answer_seconds)

    def _say_still_reading(self, state: SamplerState, answer: StillReading) -> None:
        if self._rank == 0:
            logger.warning(
                "step %d waits for data servers to tokenise %d more shards of text; more servers (data.servers) "
                "would be faster",
                state["step"] + 1,
                answer.num_parts,
            )

    def _fetch(self, segments: SegmentTable) -> dict[int, ServerSlices]:
        ranges = segments.ranges
        wanted = {}
        for server in np.unique(segments.servers[ranges > 0]).tolist():
            own = (segments.servers == server) & (ranges > 0)
            wanted[server] = self._servers[server].read.remote(segments.parts[own], segments.places[own], ranges[own])
        answers: dict[int, ServerSlices] = {}
        for server, reference in wanted.items():
            slices: ServerSlices = wait_for(reference, f"data server {server}", self._answer_seconds)
            self._alive(f"server {server}", slices.server_life)
            answers[server] = slices
        return answers

    def _alive(self, actor: str, life: str) -> None:
        self._lives.setdefault(actor, set()).add(life)
