"""The tokens of the parts of a corpus, each memory-mapped while it is in use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from bytescale.data.indexed import IntArray, Tokens
from bytescale.data.remote_tokens import RemoteTokens

MOST_OPEN = 256
"""A memory map takes a file handle, of which a process has a thousand by default; a window rarely has more parts."""


class OpenParts:
    """Maps parts when they are first asked for, and lets go of the one that was not used for longest."""

    def __init__(
        self, open_tokens: Callable[[int], Tokens], remote_parts: Sequence[int] = (), most_open: int = MOST_OPEN
    ) -> None:
        """Open nothing yet.

        Args:
            open_tokens: from the number of a part to its tokens, 1-D.
            remote_parts: those that may have to be fetched.
            most_open: parts that may be open at the same time. Views of one that is let go stay valid.
        """
        self._open_tokens = open_tokens
        self._remote_parts = remote_parts
        self._most_open = most_open
        self._open: OrderedDict[int, Tokens] = OrderedDict()

    def fetch(self, parts: IntArray, places: IntArray, counts: IntArray) -> None:
        """Before ranges of ``counts[i]`` tokens from ``places[i]`` of ``parts[i]`` are read: what lies elsewhere comes,
        several blocks at the same time. Raises ``DataError`` where it cannot be fetched."""
        wanted = np.intersect1d(parts, self._remote_parts).tolist() if self._remote_parts else []
        for part in wanted:
            own = parts == part
            if isinstance(tokens := self[part], RemoteTokens):
                tokens.fetch(places[own], places[own] + counts[own])

    def __getitem__(self, part: int) -> Tokens:
        tokens = self._open.get(part)
        if tokens is None:
            tokens = self._open_tokens(part)
            if isinstance(tokens, np.memmap):
                tokens = tokens.view(np.ndarray)  # slices of a memmap cost 2 us more
            self._open[part] = tokens
            if len(self._open) > self._most_open:
                self._open.popitem(last=False)
        self._open.move_to_end(part)
        return tokens
