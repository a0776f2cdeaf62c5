"""The server actor: tokenises its share of the corpus and sends ranges of tokens."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from bytescale.data.open_parts import OpenParts
from bytescale.data.remote.slices import IntArray, PartOwners, ServerSlices
from bytescale.data.shards import OpenShard, PartContent, Shard, ShardReader


class SharedWork:
    """The shards of a corpus and their reader, kept once in Ray's memory for as long as somebody holds this.

    A reference inside an object: as a plain argument of an actor, Ray would not keep it for the actor's restarts.
    """

    def __init__(self, shards: Sequence[Shard], reader: ShardReader) -> None:
        self._reference = ray.put((list(shards), reader))

    def get(self) -> tuple[list[Shard], ShardReader]:
        """Shards and reader."""
        return ray.get(self._reference)


TOKENISING = "tokenising"
"""The thread of a server that tokenises parts ahead of need, while another one answers reads."""


class DataServer:
    """Keeps nothing that it could not find again: a restarted server opens from the cache what it had tokenised."""

    def __init__(self, work: SharedWork) -> None:
        """Reads nothing yet.

        Args:
            work: the shards of the whole corpus and what opens them. Which of them are this server's, ``PartOwners``
                says; it does what it is asked.
        """
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process per core is enough
        self._shards, self._reader = work.get()
        self._tokens = OpenParts(lambda part: self._prepared(part).dataset.tokens)
        self._life = uuid.uuid4().hex

    @ray.method(concurrency_group=TOKENISING)
    def content(self, part: int) -> PartContent:
        """Tokenise a part, unless the cache has it, and say what is in it.

        Raises:
            DataError: a source is gone or broken; parts that were done before stay in the cache.
        """
        return self._prepared(part).content

    def read(self, parts: IntArray, places: IntArray, ranges: IntArray) -> ServerSlices:
        """The tokens of ``ranges[i]`` tokens from ``places[i]`` of part ``parts[i]``, one range after the other."""
        opened = {part: self._tokens[part] for part in np.unique(parts).tolist()}
        dtype = np.result_type(*(tokens.dtype for tokens in opened.values()))
        tokens = np.empty(int(ranges.sum()), dtype=dtype)
        at = 0
        for part, place, count in zip(parts.tolist(), places.tolist(), ranges.tolist(), strict=True):
            tokens[at : at + count] = opened[part][place : place + count]
            at += count
        return ServerSlices(tokens=tokens, server_life=self._life)

    def pid(self) -> int:
        """Of the process that this server lives in."""
        return os.getpid()

    def _prepared(self, part: int) -> OpenShard:
        return self._reader.prepare_and_open(self._shards[part])


def server_actor() -> Any:
    """``DataServer`` as an actor class, with a thread for each kind of work."""
    settings: dict[str, Any] = {"concurrency_groups": {TOKENISING: 1}}  # which Ray's own stubs do not know
    return ray.remote(**settings)(DataServer)


def owners_of(shards: Sequence[Shard], num_servers: int) -> PartOwners:
    """Who reads what of ``shards``."""
    return PartOwners(num_servers, np.array([shard.file is None for shard in shards], dtype=np.bool_))
