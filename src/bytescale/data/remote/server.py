"""The server actor. It tokenises its share of the corpus and sends ranges of tokens."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import ray

from bytescale.common.arrays import IntArray
from bytescale.data.remote.messages import PartOwners, ServerSlices
from bytescale.data.tokens.fields import field_dtype, without_field
from bytescale.data.tokens.indexed import Tokens
from bytescale.data.tokens.open_parts import MOST_OPEN, OpenParts
from bytescale.data.tokens.shards import PartContent, Shard, ShardReader, remote_parts


class SharedWork:
    """The shards of a corpus and their reader. Ray's memory keeps one copy as long as somebody holds this object.

    The reference is hidden inside this object on purpose. If it were a plain argument of an actor, Ray would not keep
    the data until the actor is restarted.
    """

    def __init__(self, shards: Sequence[Shard], reader: ShardReader) -> None:
        self._reference = ray.put((list(shards), reader))

    def get(self) -> tuple[list[Shard], ShardReader]:
        """Return the shards and their reader."""
        return ray.get(self._reference)


TOKENISING = "tokenising"
"""Name of the thread of a server that tokenises parts ahead of need. Another thread answers reads."""


class DataServer:
    """Tokenises and reads parts of the corpus.

    A server holds nothing that it could not find again: after a restart it opens from the cache what it had tokenised.
    """

    def __init__(self, work: SharedWork) -> None:
        """Read nothing yet.

        Args:
            work: the shards of the whole corpus and their reader. The server reads any shard that it is asked for;
                ``PartOwners`` tells the clients whom to ask.
        """
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per server: there may be a server for each core
        self._shards, self._reader = work.get()
        self._tokens = OpenParts(self._open_tokens, remote_parts(self._shards))
        self._fields = lru_cache(MOST_OPEN // 4)(self._open_fields)
        self._life = uuid.uuid4().hex

    @ray.method(concurrency_group=TOKENISING)
    def content(self, part: int) -> PartContent:
        """Tokenise a part, unless the cache has it, and return its content: the document lengths and the facts.

        Raises:
            DataError: a source is gone or broken. Parts that were finished before stay in the cache.
        """
        self._reader.prepare([self._shards[part]])
        return self._reader.open(self._shards[part]).content

    def read(self, parts: IntArray, places: IntArray, ranges: IntArray) -> ServerSlices:
        """Read ranges of tokens, one after the other: ``ranges[i]`` tokens from ``places[i]`` on in ``parts[i]``.

        Their fields come along: each that one of the parts has.
        """
        self._tokens.fetch(parts, places, ranges)
        columns = (parts.tolist(), places.tolist(), ranges.tolist())
        found = [self._tokens[part][place : place + count] for part, place, count in zip(*columns, strict=True)]
        held = [self._fields(part) for part in columns[0]]
        fields = {}
        for name in sorted({name for own in held for name in own}):
            taken = [
                own[name][place : place + count] if name in own else without_field(name, tokens)
                for own, tokens, place, count in zip(held, found, *columns[1:], strict=True)
            ]
            fields[name] = np.concatenate([values.astype(field_dtype(name), copy=False) for values in taken])
        return ServerSlices(tokens=np.concatenate(found), fields=fields, server_life=self._life)

    def pid(self) -> int:
        """Return the id of the process that this server lives in."""
        return os.getpid()

    def _open_tokens(self, part: int) -> Tokens:
        # A restarted server may be asked for text before it has the pair in its cache.
        self._reader.prepare([self._shards[part]])
        return self._reader.open_tokens(self._shards[part])

    def _open_fields(self, part: int) -> Mapping[str, Tokens]:
        self._reader.prepare([self._shards[part]])
        return self._reader.open_fields(self._shards[part])


def server_actor() -> Any:
    """Return ``DataServer`` as an actor class with two threads: one tokenises, the other answers reads."""
    settings: dict[str, Any] = {"concurrency_groups": {TOKENISING: 1}}  # an argument that Ray's type stubs do not know
    return ray.remote(**settings)(DataServer)


def owners_of(shards: Sequence[Shard], num_servers: int) -> PartOwners:
    """Return which server reads which of ``shards``."""
    return PartOwners(num_servers, np.array([shard.file is None for shard in shards], dtype=np.bool_))
