"""The remote loader as the trainer sees it: the first rank starts the actors, the others find them by name."""

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
from bytescale.data.batches import SamplerState
from bytescale.data.corpus import plan_shards
from bytescale.data.index import CorpusFacts
from bytescale.data.remote.calls import wait_for
from bytescale.data.remote.client import RemoteLoader
from bytescale.data.remote.cluster import NAMESPACE
from bytescale.data.remote.planner import PlannerActor, kept_steps
from bytescale.data.remote.relay import Relay, above
from bytescale.data.remote.server import SharedWork, server_actor
from bytescale.data.remote.slices import IntArray
from bytescale.plan import Plan

_LOOK_AGAIN_SECONDS = 0.05
_SAY_SECONDS = 5.0
_START_SECONDS = 3600.0
"""The first rank lists the sources and may train a tokenizer before it starts the actors; if it dies, all ranks end."""


class RemoteFeed:
    """One rank's end of the actors of one attempt at a run. Ray is joined before and left after."""

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
        """Start the actors (their owner), or wait for them.

        Args:
            config: the ``[data]`` section.
            session: name of this attempt, the same on all ranks and never used before.
            rank: HDP rank, whose slices are fetched; in a mesh several processes have the same.
            num_ranks: processes that fetch.
            is_owner: whether this one starts the actors; None: HDP rank 0 does.
            say: hears how far the servers are, where somebody has to wait for them.

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
        self._state: SamplerState | None = None  # the first step's, until somebody asks

    @property
    def facts(self) -> CorpusFacts:
        """Of what has been read of the corpus so far."""
        return wait_for(self._actors.planner.facts.remote(), "the planner actor", None)

    @property
    def actors(self) -> list[Any]:
        """The planner, then the servers, then the relays: for those who watch or kill them."""
        return [self._actors.planner, *self._actors.servers, *self._actors.relays.values()]

    def state_dict(self) -> SamplerState:
        """Where the first step of ``open`` starts."""
        if self._state is None:
            self._state = self._checked(None)
        return dict(self._state)

    def load_state_dict(self, state: SamplerState) -> None:
        """Go to ``state``, of whichever loader. Raises ``CheckpointError`` when it belongs to other data."""
        self._state = self._checked(state)

    def open(self, planner: Callable[[IntArray], Plan], stop_step: int | None) -> RemoteLoader:
        """Fetch steps from here on, up to the one before ``stop_step``; ``planner`` is sent to the planner actor."""
        return RemoteLoader(
            relay=self.relay,
            servers=self._actors.servers,
            planner=planner,
            rank=self._rank,
            state=self.state_dict(),
            stop_step=stop_step,
            prefetch_steps=self._config.prefetch_steps,
            answer_seconds=self._config.answer_seconds,
        )

    def close(self) -> None:
        """End the actors, if this rank started them."""
        if self._is_owner:
            for actor in self.actors:
                ray.kill(actor)

    @property
    def relay(self) -> Any:
        """Whom this rank asks for plans: the relay of its node, of another if its node came later, or the planner."""
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
        # No limit: what the state needs takes its time to tokenise, and the actors' end would end the wait.
        return wait_for(asked, "the planner actor", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """The handles that keep the actors alive, and what they need when they are restarted."""

    planner: Any
    servers: list[Any]
    relays: dict[str, Any]
    """By node; none where there is only one."""
    work: SharedWork | None = None
    """Held by the rank that started them."""


def start_actors(config: DataConfig, session: str, num_ranks: int) -> Actors:
    """Planner and servers, which live as long as this process does: Ray restarts them when they die before it."""
    work = SharedWork(*plan_shards(config))
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    # Ray 2.60 places actors that need nothing at random, whatever their affinity: so they need one byte of memory.
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
    # Every rank asks for the facts at the start, and those of a single node for plans; Ray's own limit is 1000.
    planner = (
        ray.remote(PlannerActor)
        .options(**lasting, name=f"{session}-planner", max_concurrency=4 * num_ranks + 16)
        .remote(config, work, servers, relays)
    )
    return Actors(planner=planner, servers=servers, relays=relays, work=work)


def _relay_settings(config: DataConfig, session: str, node: int) -> tuple[Callable[[], Any], int]:
    """Whom the relay of a node asks, and how many answers it keeps."""
    asked = above(node)
    name = f"{session}-planner" if asked is None else f"{session}-relay-{asked}"
    return partial(_find, name, config.answer_seconds), kept_steps(config)


def _find(name: str, timeout_seconds: float) -> Any:
    """The actor of that name, as soon as the first rank has started it."""
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
            fix="look for the first rank's error, and at what listing its sources takes",
        )
    )
