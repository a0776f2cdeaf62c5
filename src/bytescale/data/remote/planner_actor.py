"""The planner actor of a node. It draws, plans and verifies global batches ahead of the ranks of its node.

Planning a step is a pure function of the state in which the step starts, and of its costs if ranks refine these while
they train. So every node plans for itself, and gets the plans of the others. It plans steps that nobody has asked for
only if all steps have the same costs.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Sequence
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

HowToPlan = Shared[tuple[Planner, int | None]]
"""The planner, and the step before which planning ahead ends."""


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
        self._lock = threading.Lock()  # of what follows, up to _latest
        self._checked: tuple[str, Future[SamplerState]] | None = None  # the last state that was checked
        self._how: tuple[Planner, int | None] | None = None
        self._steps: dict[int, tuple[SamplerState, Any, Future[PlannedStep]]] = {}  # with state before, and costs
        self._latest = -1  # the latest step that anybody has asked for
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
        key = json.dumps(state, sort_keys=True)
        with self._lock:  # every rank asks about the same state
            if self._checked is None or self._checked[0] != key or _failed(self._checked[1]):
                made = self._thread.submit(lambda: BatchSampler(self._index(), self._config, state).state_dict())
                self._checked = key, made
            checked = self._checked[1]
        return checked.result()

    def num_waiting(self) -> int:
        """Return the number of parts of text that servers tokenise while somebody waits for them."""
        return self._finder.num_waiting

    def part(self, rank: int, state: SamplerState, costs: Any, how: HowToPlan) -> tuple[StepData, Segments, str]:
        """Return the part of HDP ``rank`` in the step that starts at ``state``, where its tokens are, and an id.

        The id changes when the planner is restarted. The first rank gets the whole plan, too. ``costs``: what the step
        is planned with (``plan.plan.costs_of_step``). Every rank sends the same ``how``.

        Raises ``PlanError``, ``CheckpointError`` or ``DataError`` if the step cannot be drawn or planned.
        """
        with self._lock:
            self._how = self._how or how.get()
            self._latest = max(self._latest, int(state["step"]))
            for old in [old for old in self._steps if old < self._latest - self._config.prefetch_steps - 4]:
                del self._steps[old]  # no rank lags behind that far; if one does, the step is planned again
            asked = self._step(state, costs)
        planned = asked.result()
        self._run_ahead(planned.state_after, costs)
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

    def _step(self, state: SamplerState, costs: Any) -> Future[PlannedStep]:
        """The step that starts at ``state``; one that failed is planned again. The caller holds the lock."""
        step = int(state["step"])
        known = self._steps.get(step)
        if known is None or known[:2] != (state, costs) or _failed(known[2]):
            known = self._steps[step] = state, costs, self._thread.submit(self._plan, state, costs)
        return known[2]

    def _plan(self, state: SamplerState, costs: Any) -> PlannedStep:
        assert self._how is not None, "a request says how to plan"
        sampler = self._sampler or BatchSampler(self._index(), self._config, state)
        self._sampler = None  # after an error it is not used again: half a batch may have been drawn from it
        if sampler.state_dict() != state:
            sampler.load_state_dict(state)
        planned = PlannedStep.draw(sampler, self._how[0], costs, self._config.loss_per)
        self._sampler = sampler
        self._run_ahead(planned.state_after, costs)
        return planned

    def _run_ahead(self, state: SamplerState, costs: Any) -> None:
        """Plan the steps from ``state`` on, up to ``prefetch_steps`` beyond what anybody has asked for."""
        with self._lock:
            assert self._how is not None, "a request says how to plan"
            stop, last = self._how[1], self._latest + self._config.prefetch_steps
            step = int(state["step"])
            while costs is None and step <= last and (stop is None or step < stop):
                planned = self._step(state, None)
                if not planned.done() or _failed(planned):  # the thread goes on from there, or a request does
                    return
                state = planned.result().state_after
                step = int(state["step"])


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
