"""The remote loader as the trainer sees it. The first rank starts the actors; the other ranks find them by name."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bytescale.common.errors import LoaderFailure
from bytescale.config.schema import DataConfig
from bytescale.data.loading.assemble import Segments, assemble
from bytescale.data.loading.corpus import plan_shards
from bytescale.data.loading.loader import Feed, StepData
from bytescale.data.order.batches import SamplerState
from bytescale.data.order.index import CorpusMetadata
from bytescale.data.remote.calls import Shared, no_answer, wait_for
from bytescale.data.remote.planner_actor import PlannerActor
from bytescale.data.remote.ray_cluster import NAMESPACE
from bytescale.data.remote.server import SharedWork, server_actor, servers_of
from bytescale.data.tokens.open_parts import Slice
from bytescale.plan import Planner
from bytescale.plan.plan import StepPlanner, costs_of_step

logger = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 0.05
_SAY_SECONDS = 5.0
_START_SECONDS = 3600.0
"""The least time that other ranks wait for the first one, which lists the sources and may train a tokenizer."""
_WHO = "the planner actor"


class RemoteFeed(Feed):
    """One rank's connection to the actors of one attempt at a run.

    The process must have joined Ray before it makes the feed, and leaves Ray after it has closed the feed.
    """

    def __init__(
        self,
        config: DataConfig,
        session: str,
        rank: int,
        num_ranks: int,
        *,
        is_owner: bool | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Start the actors if this process is their owner, else wait for them. Raises as ``prepare_corpus``.

        Args:
            session: name of this attempt, the same on all ranks and never used before.
            rank: HDP rank whose slices are fetched. Several processes may have the same.
            num_ranks: number of processes that fetch.
            is_owner: whether this process starts the actors; None: HDP rank 0 does.
            say: called with a line about the progress of the servers while somebody has to wait for them.
        """
        super().__init__(config.prefetch_steps)
        self._config = config
        self._rank = rank
        self._say = say
        self._is_owner = rank == 0 if is_owner is None else is_owner
        self._work: SharedWork | None = None
        self.actors: list[Any] = []
        """Handles of a planner, then of the servers, then of the planners of further nodes. Only the owner has any."""
        if self._is_owner:
            self._work = Shared(plan_shards(config))
            self.actors = start_actors(config, session, num_ranks, self._work)
        first = _find(f"{session}-planner-0", max(config.answer_seconds, _START_SECONDS))
        # No time limit where this process has just started the actors: Ray may have to start workers first.
        found = wait_for(first.others.remote(), _WHO, None if self._is_owner else config.answer_seconds)
        self._servers, nodes, self._is_text = found
        # A node that joined Ray after the actors were started has no planner. Its ranks ask those of other nodes.
        own = ray.get_runtime_context().get_node_id()
        number = nodes.index(own) if own in nodes else rank % len(nodes)
        self.planner = _find(f"{session}-planner-{number}", config.answer_seconds)
        """The planner of this rank's node."""
        self._state: SamplerState | None = None  # None: where the first step starts
        self._lives: dict[str, set[str]] = {}  # of the actors that have answered, to count their restarts

    @property
    def metadata(self) -> CorpusMetadata:
        return wait_for(self.planner.metadata.remote(), _WHO, None)

    def state_dict(self) -> SamplerState:
        if self._state is None:
            self._state = self._checked(None)
        return dict(self._state)

    def load_state_dict(self, state: SamplerState) -> None:
        self._state = self._checked(state)

    def steps(self, planner: Planner, stop_step: int | None) -> Iterator[StepData]:
        state = self.state_dict()
        how = Shared(planner)

        def wants(state: SamplerState) -> bool:
            return stop_step is None or state["step"] < stop_step

        def ask(state: SamplerState) -> Any:
            return self.planner.part.remote(self._rank, state, costs_of_step(planner, state["step"]), how)

        asked = None
        while wants(state):
            # 1. Get this rank's part of the plan, and ask for the next one if its costs are known.
            asked = asked or ask(state)
            data, segments = self._part(asked, state)
            state = data.sampler_state_after
            is_known = not isinstance(planner, StepPlanner) or planner.knows(state["step"])
            asked = ask(state) if wants(state) and is_known else None
            # 2. Call each server that has tokens of this part once, all servers at the same time.
            slices, num_bytes = self._fetch(segments)
            tables: list[Any] = [segments, *data.rank_plan.micro_batches]
            planned = [getattr(table, spec.name) for table in tables for spec in fields(table)]
            times = replace(
                data.times,
                bytes_read=num_bytes,
                bytes_received=num_bytes + sum(own.nbytes for own in planned if isinstance(own, np.ndarray)),
                restarts=sum(len(lives) - 1 for lives in self._lives.values()),
            )
            micro_batches = assemble(data.rank_plan, segments, slices, self._config.fields)
            yield replace(data, micro_batches=micro_batches, times=times)

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def _part(self, asked: Any, state: SamplerState) -> tuple[StepData, Segments]:
        """Wait for this rank's part of a step: as long as servers tokenise, and else for ``data.answer_seconds``."""
        deadline = time.monotonic() + self._config.answer_seconds
        while not ray.wait([asked], timeout=self._config.answer_seconds / 4)[0]:
            waiting = wait_for(self.planner.num_waiting.remote(), _WHO, self._config.answer_seconds)
            if waiting:
                deadline = time.monotonic() + self._config.answer_seconds
            elif time.monotonic() > deadline:
                raise no_answer(_WHO, self._config.answer_seconds)
            if waiting and self._rank == 0:
                logger.warning(
                    "step %d waits for data servers to tokenise %d more shards of text; more servers (data.servers) "
                    "would be faster",
                    state["step"] + 1,
                    waiting,
                )
        data, segments, life = wait_for(asked, _WHO, self._config.answer_seconds)
        self._lives.setdefault("planner", set()).add(life)
        return data, segments

    def _fetch(self, segments: Segments) -> tuple[list[Slice], int]:
        """Return the slice of each segment, and how many bytes the servers have sent."""
        ranges = segments.ranges
        servers = servers_of(segments.parts, segments.places, self._is_text, len(self._servers))
        wanted = {}
        for server in np.unique(servers[ranges > 0]).tolist():
            own = np.flatnonzero((servers == server) & (ranges > 0))
            arguments = segments.parts[own], segments.places[own], ranges[own]
            wanted[server] = own, self._servers[server].read.remote(*arguments)
        nothing = np.zeros(0, dtype=np.int64)
        slices: list[Slice] = [(nothing, {})] * len(ranges)
        num_bytes = 0
        for server, (own, reference) in wanted.items():
            columns, life = wait_for(reference, f"data server {server}", self._config.answer_seconds)
            self._lives.setdefault(f"server {server}", set()).add(life)
            num_bytes += sum(values.nbytes for values in columns.values())
            ends = np.cumsum(ranges[own])[:-1]
            fields = {name: np.split(values, ends) for name, values in columns.items()}
            for number, (segment, tokens) in enumerate(zip(own.tolist(), fields.pop("tokens"), strict=True)):
                slices[segment] = tokens, {name: parts[number] for name, parts in fields.items()}
        return slices, num_bytes

    def _checked(self, state: SamplerState | None) -> SamplerState:
        asked, said = self.planner.check_state.remote(state), 0
        while self._is_owner and not ray.wait([asked], timeout=_SAY_SECONDS)[0]:
            left = wait_for(self.planner.num_waiting.remote(), _WHO, None)
            if left not in (0, said):
                self._say(f"data    servers are tokenising; shards of text to go before the next step: {left}")
            said = left
        # No time limit: tokenising what the state needs may take long, and the wait ends if the actors end.
        return wait_for(asked, _WHO, None)


def start_actors(config: DataConfig, session: str, num_ranks: int, work: SharedWork) -> list[Any]:
    """Start planners and servers. They live as long as this process; Ray restarts an actor that dies earlier."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    # Ray 2.60 ignores the node affinity of an actor that needs no resource, so each actor asks for one byte of memory.
    lasting = {"num_cpus": 0, "memory": 1, "max_restarts": -1, "max_task_retries": -1}

    def on(node: str, name: str) -> dict[str, Any]:
        place = NodeAffinitySchedulingStrategy(node, soft=True)
        return {**lasting, "name": f"{session}-{name}", "namespace": NAMESPACE, "scheduling_strategy": place}

    places = [node for node in nodes for _ in range(config.servers)]
    servers = [
        server_actor().options(**on(node, f"server-{number}")).remote(work) for number, node in enumerate(places)
    ]
    actor: Any = ray.remote(PlannerActor)
    # A call takes a thread of the actor while it waits, and only ranks of the node make calls that wait.
    settings = {"max_concurrency": 4 * -(-num_ranks // len(nodes)) + 16}
    first, *further = [
        actor.options(**on(node, f"planner-{number}"), **settings).remote(config, work, servers, nodes)
        for number, node in enumerate(nodes)
    ]
    return [first, *servers, *further]


def _find(name: str, timeout_seconds: float) -> Any:
    """Wait until the first rank has started the actor called ``name``, and return its handle."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # not there yet
            time.sleep(_LOOK_AGAIN_SECONDS)
    raise LoaderFailure(
        f"the first rank did not start the actor {name} within {timeout_seconds:.0f} s",
        so="there is nobody to read the data",
        fix="look for an error of the first rank, or find out why it takes so long to list its sources",
    )
