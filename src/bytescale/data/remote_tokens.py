"""The tokens of a ``.bin`` that lies elsewhere: fetched in blocks, when they are read, and kept in the cache folder.

So nobody copies a corpus of terabytes before the first step: a server fetches the blocks that are dealt to it
(``data.remote.slices.PartOwners``), a local loader those that its rank's slices lie in.
"""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bytescale.data.atomic import file_lock, write_atomically
from bytescale.data.open_parts import OpenParts
from bytescale.data.retry import unreadable, with_retries
from bytescale.data.urls import UrlPath

BLOCK_TOKENS = 1 << 20
"""Tokens that are fetched together: 2 or 4 MiB, one request."""
_MOST_OPEN = 32


class RemoteTokens:
    """What readers ask of a memory map: its type, and ``tokens[first:stop]``."""

    def __init__(self, url: UrlPath, dtype: np.dtype, num_tokens: int, folder: Path, read_retries: int) -> None:
        """Fetch nothing yet.

        Args:
            url: of the ``.bin``.
            dtype: of its tokens.
            num_tokens: in it.
            folder: for the blocks; it belongs to this content of ``url`` alone.
            read_retries: how often a failing read is tried again.
        """
        self.dtype = dtype
        self._url = url
        self._num_tokens = num_tokens
        self._folder = folder
        self._read_retries = read_retries
        self._blocks = OpenParts(self._block, _MOST_OPEN)  # of these, every part is a block

    def __len__(self) -> int:
        return self._num_tokens

    def __getitem__(self, wanted: slice) -> NDArray[np.integer]:
        """Tokens ``first`` to ``stop``. Raises ``DataError`` where they cannot be fetched."""
        first, stop, step = wanted.indices(self._num_tokens)
        assert step == 1, "ranges of tokens have no gaps"
        if stop <= first:
            return np.zeros(0, self.dtype)
        blocks = range(first // BLOCK_TOKENS, (stop - 1) // BLOCK_TOKENS + 1)
        found = [self._blocks[block][:] for block in blocks]
        tokens = found[0] if len(found) == 1 else np.concatenate(found)
        begin = blocks.start * BLOCK_TOKENS
        return tokens[first - begin : stop - begin]

    def _block(self, number: int) -> NDArray[np.integer]:
        path = self._folder / f"{number:06d}.block"
        if not path.exists():
            with file_lock(path.with_suffix(".lock")):
                if not path.exists():
                    write_atomically(path, with_retries(partial(self._fetch, number), self._read_retries))
        return np.memmap(path, dtype=self.dtype, mode="r")

    def _fetch(self, number: int) -> bytes:
        size = self.dtype.itemsize
        first, stop = number * BLOCK_TOKENS, min((number + 1) * BLOCK_TOKENS, self._num_tokens)
        try:
            content = self._url.read_range(first * size, stop * size)
            if len(content) != (stop - first) * size:
                reason = f"{len(content)} bytes came for {(stop - first) * size}"
                raise OSError(errno.EIO, reason, str(self._url))
        except OSError as error:
            raise unreadable(error, self._url) from error
        return content
