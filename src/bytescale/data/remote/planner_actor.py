"""The planner actor. It draws, plans and verifies global batches ahead of the ranks, and publishes each of them once.

Planning a step is a pure function of the state in which the step starts, and of its costs if ranks refine these while
they train. Every request carries both. So a planner that was killed goes on from whatever its clients ask for. The
planner keeps finished steps only to answer faster. It plans steps that nobody has asked for only if all steps have the
same costs.

A planned step is one object in Ray's memory, of which every node pulls one copy. The relay of the node bundles the
requests of its ranks, and cuts their parts from that copy (``relay``). So the planner's own work hardly depends on the
number of ranks.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import ray

from bytescale.common.errors import BytescaleError
from bytescale.config.schema import DataConfig
from bytescale.data.order.batches import BatchSampler, SamplerState, make_sampler
from bytescale.data.order.index import CorpusFacts, CorpusIndex
from bytescale.data.remote.calls import wait_for
from bytescale.data.remote.messages import PartOwners, PlannedStep, StepReference, StillReading
from bytescale.data.remote.relay import Answer, RankAnswer, part_of
from bytescale.data.remote.server import SharedWork, owners_of
from bytescale.data.tokens.shards import PartContent
from bytescale.plan import Planner
from bytescale.plan.plan import plan_with_costs

_LOOK_AGAIN_SECONDS = 1.0

Result = TypeVar("Result")


class PlannerActor:
    """An asynchronous actor: many requests wait at the same time for one thread that plans."""

    def __init__(self, config: DataConfig, work: SharedWork, servers: Sequence[Any], relays: dict[str, Any]) -> None:
        """Ask nobody for anything yet.

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
        self._finder = AskServers(servers, self._owners)
        self._life = uuid.uuid4().hex
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bytescale-planner")
        self._indexing: asyncio.Future[CorpusIndex] | None = None
        self._sampler: BatchSampler | None = None
        self._checked: dict[str, asyncio.Future[SamplerState]] = {}  # the last state that was checked
        self._planner: Planner | None = None
        self._stop_step: int | None = None
        self._steps: dict[int, asyncio.Future[StepReference]] = {}
        self._latest = -1  # the latest step that anybody has asked for
        self._running_ahead: asyncio.Task[None] | None = None

    async def facts(self) -> CorpusFacts:
        """Return the summary of the parts of the corpus that have been read so far.

        Raises:
            DataError: a part that has to be read first is broken.
        """
        return (await self._indexed()).facts

    async def check_state(self, state: SamplerState | None) -> SamplerState:
        """Check that a step can start at ``state`` and return it. For None, return where the first step starts.

        The call returns once the texts of that step are tokenised.

        Raises:
            CheckpointError: ``state`` belongs to other data.
            DataError: a part that the step needs is broken.
        """
        index = await self._indexed()
        key = json.dumps(state, sort_keys=True)
        if key not in self._checked or _failed(self._checked[key]):  # every rank asks about the same state
            self._checked = {key: self._in_thread(lambda: make_sampler(index, self._config, state).state_dict())}
        return await asyncio.shield(self._checked[key])

    async def num_waiting(self) -> int:
        """Return the number of parts of text that servers tokenise while somebody waits for them."""
        return self._finder.num_waiting

    async def configure(self, planner: Planner, stop_step: int | None) -> None:
        """Set how to plan, and the step before which planning ahead ends. Every rank sends the same."""
        self._planner = planner
        self._stop_step = stop_step

    async def plan(self, state: SamplerState, costs: Any = None, lost: str = "") -> Answer:
        """Return the step that starts at ``state``, or None if the planner was not configured yet.

        Servers may need hours to tokenise the texts of a step. In that case the answer is ``StillReading``.

        Args:
            state: where the step starts.
            costs: what the step is planned with (``plan.plan.costs_of_step``).
            lost: the life of the planner whose object of this step could not be fetched; empty if none was lost.

        Raises:
            PlanError, CheckpointError: the step cannot be planned.
        """
        if self._planner is None:
            return None
        step = int(state["step"])
        if lost == self._life:
            self._steps.pop(step, None)
        planning = asyncio.ensure_future(self._step(state, costs))
        while not planning.done():
            await asyncio.wait([planning], timeout=self._config.answer_seconds / 4)
            if not planning.done() and self._finder.num_waiting:
                planning.cancel()  # ends only this request's wait: planning the step goes on
                return StillReading(self._finder.num_waiting)
        found = planning.result()
        self._latest = max(self._latest, step)
        for old in [old for old in self._steps if old < self._latest - kept_steps(self._config)]:
            del self._steps[old]
        if costs is None and (self._running_ahead is None or self._running_ahead.done()):
            self._running_ahead = asyncio.create_task(self._run_ahead(found.state_after))
        ahead = sum(other > step and future.done() for other, future in self._steps.items())
        return replace(found, steps_planned=ahead)

    async def part(self, rank: int, state: SamplerState, costs: Any = None) -> RankAnswer:
        """Return the part of ``rank`` in the step that starts at ``state``: its plan, and where its tokens are.

        Returns None if the planner was not configured yet. Arguments and errors as ``plan``.
        """
        return await part_of(self.plan, rank, state, costs)

    async def others(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the handles of the servers, in order, and of the relays by node."""
        return list(self._servers), self._relays

    async def pid(self) -> int:
        """Return the id of the process that the planner lives in."""
        return os.getpid()

    async def _indexed(self) -> CorpusIndex:
        if self._indexing is None or _failed(self._indexing):
            self._indexing = self._in_thread(self._index)
        return await asyncio.shield(self._indexing)

    def _index(self) -> CorpusIndex:
        return CorpusIndex(self._config, self._shards, self._reader.tokenizer, self._finder, text_later=True)

    def _in_thread(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run ``work``, which takes time, in the planner's one thread. Only that thread uses index and sampler."""
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _step(self, state: SamplerState, costs: Any) -> StepReference:
        """Return the step that starts at ``state``. It is planned now, unless it is planned already or under way."""
        step = int(state["step"])
        if step not in self._steps or _failed(self._steps[step]):
            index = await self._indexed()
        if step not in self._steps or _failed(self._steps[step]):  # nobody else began the step during the await
            self._steps[step] = self._in_thread(lambda: self._plan(index, state, costs))
        found = await asyncio.shield(self._steps[step])
        if found.answers(state, costs):
            return found
        self._steps.pop(step, None)  # the feed was moved to another state, which no run does
        return await self._step(state, costs)

    def _plan(self, index: CorpusIndex, state: SamplerState, costs: Any) -> StepReference:
        assert self._planner is not None, "requests wait until the planner is configured"
        sampler = self._sampler or make_sampler(index, self._config, state)
        self._sampler = None  # after an error it is not used again: half a batch may have been drawn from it
        if sampler.state_dict() != state:
            sampler.load_state_dict(state)
        batch = sampler.next_batch()
        self._sampler = sampler
        started = time.perf_counter()
        plan = plan_with_costs(self._planner, batch.lengths, costs)
        after = sampler.state_dict()
        seconds = time.perf_counter() - started
        planned = PlannedStep.of(batch, plan, index, self._owners, after, seconds, self._config.loss_per)
        return StepReference(
            planned=ray.put(planned), state_before=state, state_after=after, life=self._life, costs=costs
        )

    async def _run_ahead(self, state: SamplerState) -> None:
        """Plan the steps from ``state`` on, up to ``prefetch_steps`` beyond what anybody has asked for."""
        while self._wants(int(state["step"])):
            try:
                state = (await self._step(state, None)).state_after
            except Exception:  # a request for this step plans it again, and gets the error if that fails too
                return

    def _wants(self, step: int) -> bool:
        if self._stop_step is not None and step >= self._stop_step:
            return False
        return step <= self._latest + self._config.prefetch_steps


class AskServers:
    """A ``PartFinder`` that asks servers for the content of parts. Each part is asked for once, of its own server."""

    def __init__(self, servers: Sequence[Any], owners: PartOwners) -> None:
        self._servers = servers
        self._owners = owners
        self._asked: dict[int, Any] = {}  # requests for parts that are expected and not yet needed
        self.parts_ahead = 2 * len(servers)  # 2: parts are in random order, so servers get unequal numbers
        self.num_waiting = 0
        """Number of parts that somebody waits for now."""

    def expect(self, parts: Sequence[int]) -> None:
        for part in parts:
            if part not in self._asked:
                self._asked[part] = self._ask(part)

    def find(self, parts: Sequence[int]) -> Mapping[int, PartContent]:
        """Return the content of ``parts``. Waits as long as the servers live, because tokenising may take long.

        Raises the first error of a server.
        """
        early = {part for part in parts if part in self._asked}
        pending = {self._asked.pop(part, None) or self._ask(part): part for part in parts}
        found: dict[int, PartContent] = {}
        try:
            while pending:
                self.num_waiting = len(pending)
                done, _ = ray.wait(list(pending), num_returns=1, timeout=_LOOK_AGAIN_SECONDS)
                for reference in done:
                    part = pending.pop(reference)
                    try:
                        found[part] = wait_for(reference, f"the data server of part {part}", None)
                    except BytescaleError:
                        if part not in early:
                            raise
                        early.remove(part)  # this request was made ahead of need; the reason for its error may be gone
                        pending[self._ask(part)] = part
        finally:
            self.num_waiting = 0
        return found

    def _ask(self, part: int) -> Any:
        return self._servers[self._owners.server_of(part)].content.remote(part)


def _failed(future: asyncio.Future[Any]) -> bool:
    """Return whether the work failed. It is then tried again, because the reason may be gone."""
    return future.done() and (future.cancelled() or future.exception() is not None)


def kept_steps(config: DataConfig) -> int:
    """Return how many steps behind the latest one are kept: as many as a rank may lag behind, and some more.

    Older steps would be planned again.
    """
    return config.prefetch_steps + 4
