"""Access to the tokens of the parts of a corpus. Each part is memory-mapped while it is in use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.data.tokens.indexed import Tokens
from bytescale.data.tokens.remote_tokens import RemoteTokens

MOST_OPEN = 256
"""Parts that are open at the same time.

A memory map takes a file handle, of which a process has about a thousand by default. A window rarely has more parts.
"""


class OpenParts:
    """Maps a part when it is first asked for, and closes the least recently used one when too many are open."""

    def __init__(
        self, open_tokens: Callable[[int], Tokens], remote_parts: Sequence[int] = (), most_open: int = MOST_OPEN
    ) -> None:
        """Open nothing yet.

        Args:
            open_tokens: function from the number of a part to its tokens, 1-D.
            remote_parts: numbers of the parts whose tokens may have to be fetched.
            most_open: parts that may be open at the same time. Views of a part that is closed stay valid.
        """
        self._open_tokens = open_tokens
        self._remote_parts = remote_parts
        self._most_open = most_open
        self._open: OrderedDict[int, Tokens] = OrderedDict()

    def fetch(self, parts: IntArray, places: IntArray, counts: IntArray) -> None:
        """Fetch the remote blocks that the coming reads need, several blocks at the same time.

        Range i is ``counts[i]`` tokens from ``places[i]`` on in part ``parts[i]``; all three are int64 ``[N]``.
        Raises ``DataError`` if a block cannot be fetched.
        """
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
