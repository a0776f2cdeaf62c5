"""The tokens of the parts of a corpus, each memory-mapped while it is in use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from bytescale.data.indexed import Tokens

MOST_OPEN = 256
"""A memory map takes a file handle, of which a process has a thousand by default; a window rarely has more parts."""


class OpenParts:
    """Maps parts when they are first asked for, and lets go of the one that was not used for longest."""

    def __init__(self, open_tokens: Callable[[int], Tokens], most_open: int = MOST_OPEN) -> None:
        """Open nothing yet.

        Args:
            open_tokens: from the number of a part to its tokens, 1-D.
            most_open: parts that may be open at the same time. Views of one that is let go stay valid.
        """
        self._open_tokens = open_tokens
        self._most_open = most_open
        self._open: OrderedDict[int, Tokens] = OrderedDict()

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
