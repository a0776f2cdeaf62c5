"""Access to the tokens of the parts of a corpus. Each part is memory-mapped while it is in use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.data.tokens.indexed import Tokens
from bytescale.data.tokens.remote_tokens import RemoteTokens

Slice = tuple[NDArray[np.integer], Mapping[str, NDArray]]
"""A range of tokens of one part, and by name the numbers of those fields that the part has."""

MOST_OPEN = 256
"""Files that are open at the same time.

A memory map takes a file handle, of which a process has about a thousand by default. A window rarely has more parts.
"""


class OpenParts:
    """Maps a part when it is first asked for, and closes the least recently used ones when too many files are open."""

    def __init__(
        self,
        open_part: Callable[[int], tuple[Tokens, Mapping[str, Tokens]]],
        remote_parts: Sequence[int] = (),
        most_open: int = MOST_OPEN,
    ) -> None:
        """Open nothing yet.

        Args:
            open_part: function from the number of a part to its tokens and fields, 1-D.
            remote_parts: numbers of the parts whose tokens may have to be fetched.
            most_open: files that may be open at the same time. Views of a part that is closed stay valid.
        """
        self._open_part = open_part
        self._remote_parts = remote_parts
        self._most_open = most_open
        self._num_open = 0
        self._open: OrderedDict[int, tuple[Tokens, Mapping[str, Tokens]]] = OrderedDict()

    def slices(self, parts: IntArray, places: IntArray, counts: IntArray) -> list[Slice]:
        """Return ``counts[i]`` tokens from ``places[i]`` on in part ``parts[i]``, with fields: views where possible.

        Of remote parts the blocks are fetched first, several at the same time. All arguments are int64 ``[N]``.
        Raises ``DataError`` if one cannot be read.
        """
        for remote in np.intersect1d(parts, self._remote_parts).tolist() if self._remote_parts else []:
            own = parts == remote
            if isinstance(tokens := self[remote], RemoteTokens):
                tokens.fetch(places[own], places[own] + counts[own])
        found: list[Slice] = []
        for part, place, count in zip(parts.tolist(), places.tolist(), counts.tolist(), strict=True):
            tokens, fields = self._opened(part)
            stop = place + count
            found.append((tokens[place:stop], {name: values[place:stop] for name, values in fields.items()}))
        return found

    def __getitem__(self, part: int) -> Tokens:
        return self._opened(part)[0]

    def _opened(self, part: int) -> tuple[Tokens, Mapping[str, Tokens]]:
        found = self._open.get(part)
        if found is None:
            tokens, fields = self._open_part(part)
            found = _plain(tokens), {name: _plain(values) for name, values in fields.items()}
            self._open[part] = found
            self._num_open += 1 + len(fields)
            while self._num_open > self._most_open and len(self._open) > 1:
                self._num_open -= 1 + len(self._open.popitem(last=False)[1][1])
        self._open.move_to_end(part)
        return found


def _plain(tokens: Tokens) -> Tokens:
    """Return a memory map as an array, because slices of a memmap cost 2 us more."""
    return tokens.view(np.ndarray) if isinstance(tokens, np.memmap) else tokens
