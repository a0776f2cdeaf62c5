"""The client in a training rank: asks for its part of each step and for the tokens that the part names."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytescale.data.batches import SamplerState
from bytescale.data.loader import LoaderTimes, StepData
from bytescale.data.prefetch import Prefetcher
from bytescale.data.remote.calls import wait_for
from bytescale.data.remote.slices import IntArray, RankPart, SegmentTable, ServerSlices, assemble
from bytescale.plan import Plan


class RemoteLoader:
    """Iterates over the steps of one rank. A thread fetches up to ``prefetch_steps`` steps ahead of training."""

    def __init__(
        self,
        *,
        planner_actor: Any,
        servers: Sequence[Any],
        planner: Callable[[IntArray], Plan],
        rank: int,
        state: SamplerState,
        stop_step: int | None,
        prefetch_steps: int,
        answer_seconds: float,
    ) -> None:
        """Start fetching at ``state``.

        Args:
            planner_actor: handle of the ``PlannerActor``.
            servers: handles of the ``DataServer`` actors, in order.
            planner: how the planner actor has to plan; told to it again whenever it was restarted.
            rank: HDP rank.
            state: where the first step starts.
            stop_step: number of the step before which the iteration ends; None: never.
            prefetch_steps: finished steps that may wait, at least 1.
            answer_seconds: an actor that takes longer to answer, restarts included, is given up.
        """
        self._planner_actor = planner_actor
        self._servers = servers
        self._planner = planner
        self._rank = rank
        self._state = state
        self._stop_step = stop_step
        self._answer_seconds = answer_seconds
        self._lives: dict[str, set[str]] = {}
        self._steps = Prefetcher(self._fetch_steps(), prefetch_steps, name="bytescale-client")

    def __iter__(self) -> Iterator[StepData]:
        return self

    def __next__(self) -> StepData:
        """The next step. Raises what fetching it raised, when its turn comes."""
        started, ready = time.perf_counter(), self._steps.num_ready
        data = next(self._steps)
        waited = time.perf_counter() - started
        return replace(data, times=replace(data.times, wait_seconds=waited, steps_ready=ready))

    def close(self) -> None:
        """End the thread. Steps fetched ahead are dropped, and nothing is lost by it: no state counts them."""
        self._steps.close()

    def __enter__(self) -> RemoteLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fetch_steps(self) -> Iterator[StepData]:
        state = self._state
        while self._stop_step is None or state["step"] < self._stop_step:
            # 1. This rank's part of the plan.
            message = self._part(state)
            part: RankPart = pickle.loads(message)
            self._alive("planner", part.planner_life)
            # 2. One call to each server that has some of its tokens; all of them at the same time.
            started = time.perf_counter()
            answers = self._fetch(part.segments)
            micro_batches = assemble(part.rank_plan, part.segments, answers)
            num_bytes = sum(tokens.nbytes for tokens in answers.values())
            yield StepData(
                step=part.step,
                num_targets=part.num_targets,
                summary=part.summary,
                plan=part.plan,
                rank_plan=part.rank_plan,
                micro_batches=micro_batches,
                sampler_state_after=part.state_after,
                times=LoaderTimes(
                    planning_seconds=part.planning_seconds,
                    reading_seconds=time.perf_counter() - started,
                    bytes_read=num_bytes,
                    bytes_received=num_bytes + len(message),
                    steps_planned=part.steps_planned,
                    restarts=sum(len(lives) - 1 for lives in self._lives.values()),
                ),
            )
            state = part.state_after

    def _part(self, state: SamplerState) -> bytes:
        """The planner's answer; a planner that was restarted is told first how to plan."""
        while True:
            reference = self._planner_actor.part.remote(self._rank, state)
            message = wait_for(reference, "the planner actor", self._answer_seconds)
            if message is not None:
                return message
            configured = self._planner_actor.configure.remote(self._planner, self._stop_step)
            wait_for(configured, "the planner actor", self._answer_seconds)

    def _fetch(self, segments: SegmentTable) -> dict[int, NDArray[np.integer]]:
        ranges = segments.ranges
        wanted = {}
        for server in np.unique(segments.servers[ranges > 0]).tolist():
            own = (segments.servers == server) & (ranges > 0)
            wanted[server] = self._servers[server].read.remote(segments.parts[own], segments.places[own], ranges[own])
        answers: dict[int, NDArray[np.integer]] = {}
        for server, reference in wanted.items():
            slices: ServerSlices = wait_for(reference, f"data server {server}", self._answer_seconds)
            self._alive(f"server {server}", slices.server_life)
            answers[server] = slices.tokens
        return answers

    def _alive(self, actor: str, life: str) -> None:
        self._lives.setdefault(actor, set()).add(life)
