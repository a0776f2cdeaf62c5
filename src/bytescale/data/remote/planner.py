"""The planner actor: draws, plans and verifies global batches ahead of the ranks, and publishes each of them once.

Planning a step is a pure function of where the step starts: every request carries that, so a planner that was killed
goes on from whatever its clients ask for. What it keeps is only to answer faster. A planned step is one object in
Ray's memory, of which every node pulls one copy; ranks cut their own parts from it (``client``), and their requests
arrive bundled by their nodes (``relay``). So the planner's own work hardly depends on the number of ranks.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray

from bytescale.config.schema import DataConfig
from bytescale.data.batches import Sampler, SamplerState
from bytescale.data.corpus import CorpusFacts, CorpusIndex, assemble_index
from bytescale.data.mixture import make_sampler
from bytescale.data.remote.calls import wait_for
from bytescale.data.remote.server import SharedWork, owners_of
from bytescale.data.remote.slices import IntArray, PlannedStep, StepReference
from bytescale.plan import Plan

Planner = Callable[[IntArray], Plan]


class PlannerActor:
    """An asynchronous actor: many requests wait at the same time for one thread that plans."""

    def __init__(self, config: DataConfig, work: SharedWork, servers: Sequence[Any], relays: dict[str, Any]) -> None:
        """Asks nobody for anything yet.

        Args:
            config: the ``[data]`` section.
            work: the shards of the corpus.
            servers: handles of the ``DataServer`` actors, in order.
            relays: handles of the ``Relay`` actors by node.
        """
        self._config = config
        self._shards, self._reader = work.get()
        self._servers = servers
        self._relays = relays
        self._owners = owners_of(self._shards, len(servers))
        self._life = uuid.uuid4().hex
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bytescale-planner")
        self._indexing: asyncio.Future[tuple[CorpusIndex, Sampler]] | None = None
        self._planner: Planner | None = None
        self._stop_step: int | None = None
        self._steps: dict[int, asyncio.Future[StepReference]] = {}
        self._latest = -1  # step that anybody has asked for
        self._running_ahead: asyncio.Task[None] | None = None

    async def facts(self) -> CorpusFacts:
        """Of the corpus, once all servers have tokenised their share. Raises what they raise."""
        index, _ = await self._indexed()
        return index.facts

    async def check_state(self, state: SamplerState | None) -> SamplerState:
        """``state`` if steps can start there, and the first step's for None. Raises ``CheckpointError`` if not."""
        index, _ = await self._indexed()
        sampler = make_sampler(index, self._config)
        if state is not None:
            sampler.load_state_dict(state)
        return sampler.state_dict()

    async def configure(self, planner: Planner, stop_step: int | None) -> None:
        """How to plan, and before which step to stop planning ahead. Every rank says the same."""
        self._planner = planner
        self._stop_step = stop_step

    async def plan(self, state: SamplerState, lost: str = "") -> StepReference | None:
        """The step that starts at ``state``; None when the planner was not configured yet.

        Args:
            state: where the step starts.
            lost: life of the planner whose object of this step could not be fetched; empty: nothing was lost.

        Raises:
            PlanError, CheckpointError: the step cannot be planned.
        """
        if self._planner is None:
            return None
        step = int(state["step"])
        if lost == self._life:
            self._steps.pop(step, None)
        found = await self._step(state)
        self._latest = max(self._latest, step)
        for old in [old for old in self._steps if old < self._latest - kept_steps(self._config)]:
            del self._steps[old]
        if self._running_ahead is None or self._running_ahead.done():
            self._running_ahead = asyncio.create_task(self._run_ahead(found.state_after))
        ahead = sum(other > step and future.done() for other, future in self._steps.items())
        return replace(found, steps_planned=ahead)

    async def others(self) -> tuple[list[Any], dict[str, Any]]:
        """Handles of the servers, in order, and of the relays by node."""
        return list(self._servers), self._relays

    async def pid(self) -> int:
        """Of the process that the planner lives in."""
        return os.getpid()

    async def _indexed(self) -> tuple[CorpusIndex, Sampler]:
        if self._indexing is None:
            self._indexing = asyncio.get_running_loop().run_in_executor(self._thread, self._index)
        return await asyncio.shield(self._indexing)

    def _index(self) -> tuple[CorpusIndex, Sampler]:
        answers = wait_for([server.contents.remote() for server in self._servers], "a data server", None)
        contents = {part: content for answer in answers for part, content in answer.items()}
        ordered = [contents[part] for part in range(len(self._shards))]
        index = assemble_index(self._config, self._shards, ordered, self._reader.tokenizer)
        return index, make_sampler(index, self._config)

    async def _step(self, state: SamplerState) -> StepReference:
        """The step that starts at ``state``, planned now unless it is there or under way."""
        step = int(state["step"])
        if step not in self._steps:
            index, sampler = await self._indexed()
        if step not in self._steps:  # nobody else began it while we waited
            loop = asyncio.get_running_loop()
            self._steps[step] = loop.run_in_executor(self._thread, self._plan, index, sampler, state)
        found = await asyncio.shield(self._steps[step])
        if found.state_before == state:
            return found
        self._steps.pop(step, None)  # the feed was moved elsewhere, which no run does
        return await self._step(state)

    def _plan(self, index: CorpusIndex, sampler: Sampler, state: SamplerState) -> StepReference:
        assert self._planner is not None, "requests wait until the planner is configured"
        started = time.perf_counter()
        if sampler.state_dict() != state:
            sampler.load_state_dict(state)
        batch = sampler.next_batch()
        plan = self._planner(batch.lengths)
        after = sampler.state_dict()
        planned = PlannedStep.of(batch, plan, index, self._owners, after, time.perf_counter() - started)
        return StepReference(planned=ray.put(planned), state_before=state, state_after=after, life=self._life)

    async def _run_ahead(self, state: SamplerState) -> None:
        """Plan the steps from ``state`` on, up to ``prefetch_steps`` beyond what anybody has asked for."""
        while self._wants(int(state["step"])):
            try:
                state = (await self._step(state)).state_after
            except Exception:  # kept in the step's future: whoever asks for the step gets it
                return

    def _wants(self, step: int) -> bool:
        if self._stop_step is not None and step >= self._stop_step:
            return False
        return step <= self._latest + self._config.prefetch_steps


def kept_steps(config: DataConfig) -> int:
    """How far behind the foremost rank another one may be, and some more. Older steps would be planned again."""
    return config.prefetch_steps + 4
