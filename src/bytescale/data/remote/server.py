"""The server actor: tokenises its share of the corpus and sends ranges of tokens."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence

import numpy as np
import ray

from bytescale.data.corpus import PartContent
from bytescale.data.remote.slices import IntArray, PartOwners, ServerSlices
from bytescale.data.shards import OpenShard, Shard, ShardReader


class SharedWork:
    """The shards of a corpus and their reader, kept once in Ray's memory for as long as somebody holds this.

    A reference inside an object: as a plain argument of an actor, Ray would not keep it for the actor's restarts.
    """

    def __init__(self, shards: Sequence[Shard], reader: ShardReader) -> None:
        self._reference = ray.put((list(shards), reader))

    def get(self) -> tuple[list[Shard], ShardReader]:
        """Shards and reader."""
        return ray.get(self._reference)


class DataServer:
    """Keeps nothing that it could not find again: a restarted server opens from the cache what it had tokenised."""

    def __init__(self, number: int, num_servers: int, work: SharedWork) -> None:
        """Reads nothing yet.

        Args:
            number: of this server, from 0.
            num_servers: how many share the work; server ``i`` tokenises shards ``i``, ``i + num_servers``, ...
            work: the shards of the whole corpus and what opens them.
        """
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process per core is enough
        self._number = number
        self._num_servers = num_servers
        self._shards, self._reader = work.get()
        self._open: dict[int, OpenShard] = {}
        self._life = uuid.uuid4().hex

    def contents(self) -> dict[int, PartContent]:
        """Tokenise this server's shards and say what is in them, by number of the part.

        Raises:
            DataError: a source is gone or broken; shards that were done before stay in the cache.
        """
        own = range(self._number, len(self._shards), self._num_servers)
        return {part: _content(self._shard(part)) for part in own}

    def read(self, parts: IntArray, places: IntArray, ranges: IntArray) -> ServerSlices:
        """The tokens of ``ranges[i]`` tokens from ``places[i]`` of part ``parts[i]``, one range after the other."""
        opened = {part: self._shard(part).dataset.tokens.view(np.ndarray) for part in np.unique(parts).tolist()}
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

    def _shard(self, part: int) -> OpenShard:
        if part not in self._open:
            self._open[part] = self._reader.prepare_and_open(self._shards[part])
        return self._open[part]


def _content(shard: OpenShard) -> PartContent:
    return PartContent(document_offsets=shard.dataset.index.document_offsets, facts=shard.facts)


def owners_of(shards: Sequence[Shard], num_servers: int) -> PartOwners:
    """Who reads what of ``shards``."""
    return PartOwners(num_servers, np.array([shard.file is None for shard in shards], dtype=np.bool_))
