"""The planner actor: draws, plans and verifies global batches ahead of the ranks, and gives each rank its part.

Planning a step is a pure function of where the step starts: every request carries that, so a planner that was killed
goes on from whatever its clients ask for. What it keeps is only to answer faster: the steps that some rank has not
fetched yet, and some beyond.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bytescale.config.schema import DataConfig
from bytescale.data.batches import GlobalBatch, Sampler, SamplerState
from bytescale.data.corpus import CorpusFacts, CorpusIndex, assemble_index
from bytescale.data.mixture import make_sampler
from bytescale.data.remote.calls import wait_for
from bytescale.data.remote.server import SharedWork, owners_of
from bytescale.data.remote.slices import IntArray, RankPart, locate_segments
from bytescale.plan import Plan, RankPlan
from bytescale.plan.summary import PlanSummary

Planner = Callable[[IntArray], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A global batch and its plan."""

    batch: GlobalBatch
    plan: Plan
    digest: int
    summary: PlanSummary
    state_after: SamplerState
    seconds: float


class PlannerActor:
    """An asynchronous actor: requests of many ranks wait at the same time for one thread that plans."""

    def __init__(self, config: DataConfig, num_ranks: int, work: SharedWork, servers: Sequence[Any]) -> None:
        """Asks nobody for anything yet.

        Args:
            config: the ``[data]`` section.
            num_ranks: that will ask for their parts.
            work: the shards of the corpus.
            servers: handles of the ``DataServer`` actors, in order.
        """
        self._config = config
        self._num_ranks = num_ranks
        self._shards, self._reader = work.get()
        self._servers = servers
        self._owners = owners_of(self._shards, len(servers))
        self._life = uuid.uuid4().hex
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bytescale-planner")
        self._indexing: asyncio.Future[tuple[CorpusIndex, Sampler]] | None = None
        self._planner: Planner | None = None
        self._stop_step: int | None = None
        self._steps: dict[int, asyncio.Future[PlannedStep]] = {}
        self._served: dict[int, int] = {}  # rank -> last step that it fetched
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

    async def part(self, rank: int, state: SamplerState) -> bytes | None:
        """A pickled ``RankPart`` of the step that starts at ``state``; None when the planner was not configured yet.

        Raises:
            PlanError, CheckpointError: the step cannot be planned.
        """
        if self._planner is None:
            return None
        step = int(state["step"])
        planned = await self._step(state)
        self._served[rank] = max(step, self._served.get(rank, -1))
        self._forget()
        part = await self._cut(planned, rank)
        if self._running_ahead is None or self._running_ahead.done():
            self._running_ahead = asyncio.create_task(self._run_ahead(planned.state_after))
        return part

    async def servers(self) -> list[Any]:
        """Handles of the servers, in order."""
        return list(self._servers)

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

    async def _step(self, state: SamplerState) -> PlannedStep:
        """The step that starts at ``state``, planned now unless it is there or under way."""
        step = int(state["step"])
        if step not in self._steps:
            _, sampler = await self._indexed()
        if step not in self._steps:  # nobody else began it while we waited
            loop = asyncio.get_running_loop()
            self._steps[step] = loop.run_in_executor(self._thread, self._plan, sampler, state)
        return await asyncio.shield(self._steps[step])

    def _plan(self, sampler: Sampler, state: SamplerState) -> PlannedStep:
        assert self._planner is not None, "requests wait until the planner is configured"
        started = time.perf_counter()
        if sampler.state_dict() != state:
            sampler.load_state_dict(state)
        batch = sampler.next_batch()
        plan = self._planner(batch.lengths)
        return PlannedStep(
            batch=batch,
            plan=plan,
            digest=plan.digest(),
            summary=PlanSummary.of(plan),
            state_after=sampler.state_dict(),
            seconds=time.perf_counter() - started,
        )

    async def _cut(self, planned: PlannedStep, rank: int) -> bytes:
        index, _ = await self._indexed()
        rank_plan = RankPlan.of(planned.plan, rank, digest=planned.digest)
        part = RankPart(
            step=planned.batch.step,
            rank_plan=rank_plan,
            segments=locate_segments(rank_plan, planned.batch, index, self._owners),
            num_targets=planned.batch.total_targets,
            summary=planned.summary,
            plan=planned.plan if rank == 0 else None,
            state_after=planned.state_after,
            planning_seconds=planned.seconds,
            steps_planned=sum(step > planned.batch.step and future.done() for step, future in self._steps.items()),
            planner_life=self._life,
        )
        return pickle.dumps(part, protocol=pickle.HIGHEST_PROTOCOL)

    async def _run_ahead(self, state: SamplerState) -> None:
        """Plan the steps from ``state`` on, up to ``prefetch_steps`` beyond what any rank has fetched."""
        while self._wants(int(state["step"])):
            try:
                state = (await self._step(state)).state_after
            except Exception:  # kept in the step's future: whoever asks for the step gets it
                return

    def _wants(self, step: int) -> bool:
        if self._stop_step is not None and step >= self._stop_step:
            return False
        return step <= max(self._served.values(), default=-1) + self._config.prefetch_steps

    def _forget(self) -> None:
        """Drop steps that every rank has fetched."""
        if len(self._served) < self._num_ranks:
            return
        for step in [step for step in self._steps if step <= min(self._served.values())]:
            del self._steps[step]
