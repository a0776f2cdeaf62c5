"""The corpus of the remote loader: servers find what its parts contain, and send the token ranges that a rank asks for.

The first process starts the servers; the others find them by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import ray.exceptions
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bytescale.common.arrays import IntArray
from bytescale.common.errors import BytescaleError
from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import Corpus, plan_shards
from bytescale.data.loading.loader import Reader
from bytescale.data.order.index import CorpusIndex
from bytescale.data.remote.calls import wait_for
from bytescale.data.remote.ray_cluster import NAMESPACE
from bytescale.data.remote.server import SharedWork, server_actor, servers_of
from bytescale.data.tokens.open_parts import Slice
from bytescale.data.tokens.progress import Progress, ProgressCallback
from bytescale.data.tokens.shards import PartContent, Shard

ANSWER_SECONDS = 120.0
"""A server that takes longer to send tokens makes the run stop: twice what Ray needs to restart one on a busy node."""
_LOOK_AGAIN_SECONDS = 1.0


@contextmanager
def served_corpus(config: DataConfig, session: str, reader: Reader, progress: ProgressCallback) -> Iterator[Corpus]:
    """Open the corpus for the time of the block, in a process that has joined Ray. Every process calls it.

    ``session``: name of this attempt, the same in all processes and never used before. ``progress`` is called while
    servers tokenise what is needed now.

    Raises as ``prepare_corpus``.
    """
    started: list[Any] = []
    work: SharedWork = []
    try:
        if reader.is_first:
            work = [ray.put(plan_shards(config))]  # kept here, for servers that are restarted
            started = start_servers(config, session, work)
        told = [len(started)]
        reader.broadcast(told)
        servers = [ray.get_actor(f"{session}-server-{number}", namespace=NAMESPACE) for number in range(*told)]
        # No time limit: Ray may have to start workers first.
        (shared,) = wait_for(servers[0].work.remote(), "data server 0", None)
        shards, shard_reader = ray.get(shared)
        index = CorpusIndex(config, shards, shard_reader.encode, AskServers(servers, shards, progress), text_later=True)
        yield Corpus(
            parts=ServedParts(servers, index.is_text),
            index=index,
            further_fields=config.fields,
            tokenizer=shard_reader.tokenizer,
        )
    finally:
        for server in started:
            ray.kill(server)


def start_servers(config: DataConfig, session: str, work: SharedWork) -> list[Any]:
    """Start the servers of all nodes. They live as long as this process; Ray restarts one that dies earlier."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    # Ray 2.60 ignores the node affinity of an actor that needs no resource, so each one asks for one byte of memory.
    lasting = {"num_cpus": 0, "memory": 1, "max_restarts": -1, "max_task_retries": -1, "namespace": NAMESPACE}
    started = []
    for number, node in enumerate(node for node in nodes for _ in range(config.servers)):
        place = NodeAffinitySchedulingStrategy(node, soft=True)
        actor = server_actor().options(**lasting, name=f"{session}-server-{number}", scheduling_strategy=place)
        started.append(actor.remote(work))
    return started


class AskServers:
    """A ``PartFinder`` that asks servers for the content of parts. Each part is asked for once, of its own server."""

    def __init__(self, servers: Sequence[Any], shards: Sequence[Shard], progress: ProgressCallback) -> None:
        self._servers = servers
        self._shards = shards
        self._progress = progress
        self._asked: dict[int, Any] = {}  # requests for parts that are expected and not yet needed
        self.parts_ahead = 2 * len(servers)  # 2: parts are in random order, so servers get unequal numbers

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
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=_LOOK_AGAIN_SECONDS)
            if not done:
                self._report(parts, found)
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
        return [found[part] for part in parts]

    def _ask(self, part: int) -> Any:
        return self._servers[part % len(self._servers)].content.remote(part)

    def _report(self, parts: Sequence[int], found: dict[int, PartContent]) -> None:
        done, total = (sum(self._shards[part].num_bytes for part in own) for own in (found, parts))
        stage = "waiting for servers to tokenise (more of them, data.servers, would be faster)"
        self._progress(Progress(stage=stage, done_bytes=done, total_bytes=total))


class ServedParts:
    """A ``PartReader`` that calls each server that has some of the tokens once, all servers at the same time."""

    def __init__(self, servers: Sequence[Any], is_text: NDArray) -> None:
        self.servers = servers
        self._is_text = is_text
        self._lives: dict[int, set[str]] = {}  # of the servers that have answered

    @property
    def restarts(self) -> int:
        return sum(len(lives) - 1 for lives in self._lives.values())

    def slices(self, parts: IntArray, places: IntArray, counts: IntArray) -> list[Slice]:
        """See ``PartReader``. Raises ``LoaderFailure`` if a server does not answer in ``ANSWER_SECONDS``."""
        numbers = servers_of(parts, places, self._is_text, len(self.servers))
        wanted = {}
        for number in np.unique(numbers[counts > 0]).tolist():
            own = np.flatnonzero((numbers == number) & (counts > 0))
            wanted[number] = own, self.servers[number].read.remote(parts[own], places[own], counts[own])
        slices: list[Slice] = [(np.zeros(0, dtype=np.int64), {})] * len(counts)
        for number, (own, reference) in wanted.items():
            columns, life = wait_for(reference, f"data server {number}", ANSWER_SECONDS)
            self._lives.setdefault(number, set()).add(life)
            ends = np.cumsum(counts[own])[:-1]
            fields = {name: np.split(values, ends) for name, values in columns.items()}
            for place, (segment, tokens) in enumerate(zip(own.tolist(), fields.pop("tokens"), strict=True)):
                slices[segment] = tokens, {name: values[place] for name, values in fields.items()}
        return slices
