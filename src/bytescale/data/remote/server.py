"""The server actor: tokenises its share of the corpus and sends ranges of tokens."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from bytescale.data.indexed import Tokens
from bytescale.data.open_parts import OpenParts
from bytescale.data.remote.slices import IntArray, PartOwners, ServerSlices
from bytescale.data.shards import PartContent, Shard, ShardReader, remote_parts


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
        self._tokens = OpenParts(self._open_tokens, remote_parts(self._shards))
        self._life = uuid.uuid4().hex

    @ray.method(concurrency_group=TOKENISING)
    def content(self, part: int) -> PartContent:
        """Tokenise a part, unless the cache has it, and say what is in it.

        Raises:
            DataError: a source is gone or broken; parts that were done before stay in the cache.
        """
        self._reader.prepare([self._shards[part]])
        return self._reader.open(self._shards[part]).content

    def read(self, parts: IntArray, places: IntArray, ranges: IntArray) -> ServerSlices:
        """The tokens of ``ranges[i]`` tokens from ``places[i]`` of part ``parts[i]``, one range after the other."""
        self._tokens.fetch(parts, places, ranges)
        columns = (parts.tolist(), places.tolist(), ranges.tolist())
        found = [self._tokens[part][place : place + count] for part, place, count in zip(*columns, strict=True)]
        return ServerSlices(tokens=np.concatenate(found), server_life=self._life)

    def pid(self) -> int:
        """Of the process that this server lives in."""
        return os.getpid()

    def _open_tokens(self, part: int) -> Tokens:
        self._reader.prepare([self._shards[part]])  # a restarted server may be asked for text before its cache is found
        return self._reader.open_tokens(self._shards[part])


def server_actor() -> Any:
    """``DataServer`` as an actor class, with a thread for each kind of work."""
    settings: dict[str, Any] = {"concurrency_groups": {TOKENISING: 1}}  # which Ray's own stubs do not know
    return ray.remote(**settings)(DataServer)


def owners_of(shards: Sequence[Shard], num_servers: int) -> PartOwners:
    """Who reads what of ``shards``."""
    return PartOwners(num_servers, np.array([shard.file is None for shard in shards], dtype=np.bool_))
