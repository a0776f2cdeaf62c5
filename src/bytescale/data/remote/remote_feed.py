"""The remote loader as the trainer sees it. The first rank starts the actors; the other ranks find them by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bytescale.common.errors import LoaderFailure, problem
from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import plan_shards
from bytescale.data.order.batches import SamplerState
from bytescale.data.order.index import CorpusFacts
from bytescale.data.remote.calls import wait_for
from bytescale.data.remote.client import DataService, RemoteLoader
from bytescale.data.remote.planner_actor import PlannerActor, kept_steps
from bytescale.data.remote.ray_cluster import NAMESPACE
from bytescale.data.remote.relay import Relay, above
from bytescale.data.remote.server import SharedWork, server_actor
from bytescale.plan import Planner

_LOOK_AGAIN_SECONDS = 0.05
_SAY_SECONDS = 5.0
_START_SECONDS = 3600.0
"""The least time that other ranks wait for the first rank to start the actors.

Before it starts them, the first rank lists the sources and may train a tokenizer. If it dies, all ranks end anyway.
"""


class RemoteFeed:
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
        """Start the actors if this process is their owner, else wait for them.

        Args:
            config: the ``[data]`` section.
            session: name of this attempt, the same on all ranks and never used before.
            rank: HDP rank whose slices are fetched. With tensor or pipeline parallelism, several processes have the
                same HDP rank.
            num_ranks: number of processes that fetch.
            is_owner: whether this process starts the actors; None: HDP rank 0 does.
            say: called with a line of text about the progress of the servers while somebody has to wait for them.

        Raises:
            ConfigError, DataError: as ``prepare_corpus``.
        """
        self._config = config
        self._rank = rank
        self._say = say
        self._is_owner = rank == 0 if is_owner is None else is_owner
        if self._is_owner:
            self._actors = start_actors(config, session, num_ranks)
        else:
            planner = _find(f"{session}-planner", max(config.answer_seconds, _START_SECONDS))
            servers, relays = wait_for(planner.others.remote(), "the planner actor", config.answer_seconds)
            self._actors = Actors(planner=planner, servers=servers, relays=relays)
        self._state: SamplerState | None = None  # None: where the first step starts

    @property
    def facts(self) -> CorpusFacts:
        """Summary of the parts of the corpus that have been read so far."""
        return wait_for(self._actors.planner.facts.remote(), "the planner actor", None)

    @property
    def actors(self) -> list[Any]:
        """Handles of the planner, then of the servers, then of the relays, to watch or to kill them."""
        return [self._actors.planner, *self._actors.servers, *self._actors.relays.values()]

    def state_dict(self) -> SamplerState:
        """Return where the first step of ``open`` starts."""
        if self._state is None:
            self._state = self._checked(None)
        return dict(self._state)

    def load_state_dict(self, state: SamplerState) -> None:
        """Go to ``state``, which the local or the remote loader made. Raises ``CheckpointError`` if its data differ."""
        self._state = self._checked(state)

    def open(self, planner: Planner, stop_step: int | None) -> RemoteLoader:
        """Fetch steps from the current position on, up to the one before ``stop_step``; None: without an end.

        ``planner`` is sent to the planner actor.
        """
        return RemoteLoader(
            DataService(
                relay=self.relay,
                servers=self._actors.servers,
                further_fields=self._config.fields,
                answer_seconds=self._config.answer_seconds,
            ),
            planner=planner,
            rank=self._rank,
            state=self.state_dict(),
            stop_step=stop_step,
            prefetch_steps=self._config.prefetch_steps,
        )

    def close(self) -> None:
        """End the actors, if this rank started them."""
        if self._is_owner:
            for actor in self.actors:
                ray.kill(actor)

    @property
    def relay(self) -> Any:
        """The actor that this rank asks for plans: the relay of its node, or the planner if there are no relays.

        A node that joined Ray after the relays were started has no relay. Its ranks ask the relays of other nodes.
        """
        relays = list(self._actors.relays.values())
        if not relays:
            return self._actors.planner
        return self._actors.relays.get(ray.get_runtime_context().get_node_id(), relays[self._rank % len(relays)])

    def _checked(self, state: SamplerState | None) -> SamplerState:
        asked, said = self._actors.planner.check_state.remote(state), 0
        while self._is_owner and not ray.wait([asked], timeout=_SAY_SECONDS)[0]:
            left = wait_for(self._actors.planner.num_waiting.remote(), "the planner actor", None)
            if left not in (0, said):
                self._say(f"data    servers are tokenising; shards of text to go before the next step: {left}")
            said = left
        # No time limit: tokenising what the state needs may take long, and the wait ends if the actors end.
        return wait_for(asked, "the planner actor", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """Handles of the actors, which keep them alive, and the data that they need when they are restarted."""

    planner: Any
    servers: list[Any]
    relays: dict[str, Any]
    """Relays by the id of their node. Empty if there is only one node."""
    work: SharedWork | None = None
    """The shards and their reader. Only the rank that started the actors holds them."""


def start_actors(config: DataConfig, session: str, num_ranks: int) -> Actors:
    """Start planner, servers and relays. They live as long as this process; Ray restarts an actor that dies earlier."""
    work = SharedWork(*plan_shards(config))
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    # Ray 2.60 ignores the node affinity of an actor that needs no resource, so each actor asks for one byte of memory.
    lasting = {"num_cpus": 0, "memory": 1, "max_restarts": -1, "max_task_retries": -1}

    def on(node: str, name: str) -> dict[str, Any]:
        place = NodeAffinitySchedulingStrategy(node, soft=True)
        return {**lasting, "name": f"{session}-{name}", "scheduling_strategy": place}

    places = [node for node in nodes for _ in range(config.servers)]
    servers = [
        server_actor().options(**on(node, f"server-{number}")).remote(work) for number, node in enumerate(places)
    ]
    relays = {
        node: ray.remote(Relay).options(**on(node, f"relay-{number}")).remote(*_relay_settings(config, session, number))
        for number, node in enumerate(nodes if len(nodes) > 1 else [])
    }
    # Ray allows 1000 calls at the same time by default. At the start every rank asks the planner for the facts, and on
    # a single node every rank asks it for plans.
    planner = (
        ray.remote(PlannerActor)
        .options(**lasting, name=f"{session}-planner", max_concurrency=4 * num_ranks + 16)
        .remote(config, work, servers, relays)
    )
    return Actors(planner=planner, servers=servers, relays=relays, work=work)


def _relay_settings(config: DataConfig, session: str, node: int) -> tuple[Callable[[], Any], int]:
    """Return a function that finds the actor whom the relay of ``node`` asks, and how many answers the relay keeps."""
    asked = above(node)
    name = f"{session}-planner" if asked is None else f"{session}-relay-{asked}"
    return partial(_find, name, config.answer_seconds), kept_steps(config)


def _find(name: str, timeout_seconds: float) -> Any:
    """Wait until the first rank has started the actor called ``name``, and return its handle."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # not there yet
            time.sleep(_LOOK_AGAIN_SECONDS)
    raise LoaderFailure(
        problem(
            f"the first rank did not start the actor {name} within {timeout_seconds:.0f} s",
            so="there is nobody to read the data",
            fix="look for an error of the first rank, or find out why it takes so long to list its sources",
        )
    )
