"""The planner actor of a node. It draws, plans and verifies the global batches that the ranks of its node ask for.

Planning a step is a pure function of the state in which the step starts, and of its costs if ranks refine these while
they train. So every node plans for itself, and gets the plans of the others. Ranks ask for a step while they still
fetch the tokens of the one before, so it is planned ahead of them.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import ray.exceptions
from numpy.typing import NDArray

from bytescale.common.errors import BytescaleError
from bytescale.config.schema import DataConfig
from bytescale.data.loading.assemble import Segments
from bytescale.data.loading.loader import PlannedStep, StepData
from bytescale.data.order.batches import BatchSampler, SamplerState
from bytescale.data.order.index import CorpusIndex, CorpusMetadata
from bytescale.data.remote.calls import Shared, wait_for
from bytescale.data.remote.server import SharedWork
from bytescale.data.tokens.shards import PartContent
from bytescale.plan import Planner

_LOOK_AGAIN_SECONDS = 1.0


class PlannerActor:
    """Many requests wait at the same time for one thread that plans: only that thread uses index and sampler."""

    def __init__(self, config: DataConfig, work: SharedWork, servers: Sequence[Any], nodes: Sequence[str]) -> None:
        """``servers``: handles of all ``DataServer`` actors. ``nodes``: those with planners, in these' order."""
        self._config = config
        self._shards, self._reader = work.get()
        self._servers = servers
        self._nodes = nodes
        self._finder = AskServers(servers)
        self._life = uuid.uuid4().hex
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bytescale-planner")
        self._lock = threading.Lock()  # of what was asked for, and of the planner
        # No rank lags behind others by more steps than these; if one does, its step is planned again.
        self._asked: deque[tuple[Any, Future[Any]]] = deque(maxlen=config.prefetch_steps + 5)
        self._planner: Planner | None = None
        self._cutting = threading.Lock()  # a part of a group of thousands of ranks takes GB while it is cut
        self._made_index: CorpusIndex | None = None
        self._sampler: BatchSampler | None = None

    def metadata(self) -> CorpusMetadata:
        """Return the summary of the parts that have been read so far. Raises ``DataError`` if one is broken."""
        return self._thread.submit(lambda: self._index().metadata).result()

    def check_state(self, state: SamplerState | None) -> SamplerState:
        """Check that a step can start at ``state`` and return it. For None, return where the first step starts.

        The call returns once the texts of that step are tokenised. Raises as ``BatchSampler``.
        """
        return self._once(state, lambda: BatchSampler(self._index(), self._config, state).state_dict()).result()

    def num_waiting(self) -> int:
        """Return the number of parts of text that servers tokenise while somebody waits for them."""
        return self._finder.num_waiting

    def part(self, rank: int, state: SamplerState, costs: Any, how: Shared[Planner]) -> tuple[StepData, Segments, str]:
        """Return the part of HDP ``rank`` in the step that starts at ``state``, where its tokens are, and an id.

        The id changes when the planner is restarted. The first rank gets the whole plan, too. ``costs``: what the step
        is planned with (``plan.plan.costs_of_step``). Every rank sends the same planner.

        Raises ``PlanError``, ``CheckpointError`` or ``DataError`` if the step cannot be drawn or planned.
        """
        with self._lock:
            planner = self._planner = self._planner or how.get()
        planned = self._once((state, costs), lambda: self._plan(planner, state, costs)).result()
        with self._cutting:
            data, segments = planned.part_of(rank)
        return replace(data, plan=data.plan if rank == 0 else None), segments, self._life

    def others(self) -> tuple[list[Any], list[str], NDArray[np.bool_]]:
        """Return the handles of the servers, the nodes that have a planner, and which parts of the corpus are text."""
        is_text = np.array([shard.file is None for shard in self._shards], dtype=np.bool_)
        return list(self._servers), list(self._nodes), is_text

    def _index(self) -> CorpusIndex:
        self._made_index = self._made_index or CorpusIndex(
            self._config, self._shards, self._reader.encode, self._finder, text_later=True
        )
        return self._made_index

    def _once(self, asked: Any, make: Callable[[], Any]) -> Future[Any]:
        """Make in the thread what is ``asked``, for all ranks that ask alike; again if it failed."""
        with self._lock:
            for known, future in self._asked:
                if known == asked and not _failed(future):
                    return future
            self._asked.append((asked, self._thread.submit(make)))
            return self._asked[-1][1]

    def _plan(self, planner: Planner, state: SamplerState, costs: Any) -> PlannedStep:
        sampler = self._sampler or BatchSampler(self._index(), self._config, state)
        self._sampler = None  # after an error it is not used again: half a batch may have been drawn from it
        if sampler.state_dict() != state:
            sampler.load_state_dict(state)
        planned = PlannedStep.draw(sampler, planner, costs, self._config.loss_per)
        self._sampler = sampler
        return planned


class AskServers:
    """A ``PartFinder`` that asks servers for the content of parts. Each part is asked for once, of its own server."""

    def __init__(self, servers: Sequence[Any]) -> None:
        self._servers = servers
        self._asked: dict[int, Any] = {}  # requests for parts that are expected and not yet needed
        self.parts_ahead = 2 * len(servers)  # 2: parts are in random order, so servers get unequal numbers
        self.num_waiting = 0
        """Number of parts that somebody waits for now."""

    def expect(self, parts: Sequence[int]) -> None:
        for part in parts:
            if part not in self._asked:
                self._asked[part] = self._ask(part)

    def find(self, parts: Sequence[int]) -> list[PartContent]:
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
                    who = f"the data server of part {part}"
                    try:
                        found[part] = ray.get(wait_for(reference, who, None)[0])
                    except ray.exceptions.ObjectLostError:  # it was lost with the server, which is restarted
                        pending[self._ask(part)] = part
                    except BytescaleError:
                        if part not in early:
                            raise
                        early.remove(part)  # this request was made ahead of need; the reason for its error may be gone
                        pending[self._ask(part)] = part
        finally:
            self.num_waiting = 0
        return [found[part] for part in parts]

    def _ask(self, part: int) -> Any:
        return self._servers[part % len(self._servers)].content.remote(part)


def _failed(future: Future[Any]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
