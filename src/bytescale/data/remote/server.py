"""The server actor. It tokenises its share of the corpus and sends ranges of tokens."""

from __future__ import annotations

import os
import uuid
from functools import lru_cache
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.data.tokens.indexed import field_dtype, without_field
from bytescale.data.tokens.open_parts import OpenParts

SharedWork = list[Any]
"""Ray's reference to the shards of a corpus and their reader, in a list: Ray would replace a bare one by its object."""

TOKENISING = "tokenising"
"""Name of the thread of a server that tokenises parts ahead of need. Another thread answers reads."""
_DEALT_TOKENS = 1 << 20
_KEPT_CONTENTS = 64
"""Contents of parts that a server keeps in Ray's memory, for all ranks."""


def servers_of(parts: IntArray, places: IntArray, is_text: NDArray[np.bool_], num_servers: int) -> IntArray:
    """``[P]`` number of the server that reads range i, which starts at ``places[i]`` of ``parts[i]``.

    A part of text is read by the server that tokenised it. Ranges of a ``.bin`` file are dealt to all servers in turn.
    """
    return np.where(is_text[parts], parts, parts + places // _DEALT_TOKENS) % num_servers


class DataServer:
    """Tokenises and reads parts of the corpus. It holds nothing that it could not find again in the cache."""

    def __init__(self, work: SharedWork) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per server: there may be a server for each core
        self._work = work
        self._shards, self._reader = ray.get(work[0])
        self._parts = OpenParts(lambda part: self._reader.open_part(self._shards[part]))
        self._content = lru_cache(_KEPT_CONTENTS)(self._put_content)
        self._life = uuid.uuid4().hex

    def work(self) -> SharedWork:
        """Return what the server was started with."""
        return self._work

    @ray.method(concurrency_group=TOKENISING)
    def content(self, part: int) -> list[Any]:
        """Tokenise a part, unless the cache has it. Returns Ray's reference to its ``PartContent``, in a list.

        Ray's memory has it once on each node, for all ranks there. Raises ``DataError`` as ``ShardReader.prepare``.
        """
        return [self._content(part)]

    def read(self, parts: IntArray, places: IntArray, ranges: IntArray) -> tuple[dict[str, NDArray], str]:
        """Read ranges of tokens, one after the other: ``ranges[i]`` tokens from ``places[i]`` on in ``parts[i]``.

        Returns ``tokens`` in the integer type of the file, each field that one of the parts has by its name, and an id
        that changes when the server is restarted.
        """
        slices = self._parts.slices(parts, places, ranges)
        columns = {"tokens": np.concatenate([tokens for tokens, _ in slices])}
        for name in sorted({name for _, own in slices for name in own}):
            taken = [own[name] if name in own else without_field(name, tokens) for tokens, own in slices]
            columns[name] = np.concatenate([values.astype(field_dtype(name), copy=False) for values in taken])
        return columns, self._life

    def _put_content(self, part: int) -> Any:
        self._reader.prepare([self._shards[part]])
        return ray.put(self._reader.content(self._shards[part]))


def server_actor() -> Any:
    """Return ``DataServer`` as an actor class with two threads: one tokenises, the other answers reads."""
    settings: dict[str, Any] = {"concurrency_groups": {TOKENISING: 1}}  # an argument that Ray's type stubs do not know
    return ray.remote(**settings)(DataServer)
