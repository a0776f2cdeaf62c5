"""The tokens of a ``.bin`` that lies on another machine.

They are fetched in blocks when they are read, and the blocks are kept in the cache folder. So nobody copies a corpus of
terabytes before the first step: a server fetches the blocks that are dealt to it (``data.remote.messages.PartOwners``),
and a local loader fetches the blocks that hold its rank's slices.
"""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.atomic import remove_stale_temporaries, whole_file
from bytescale.common.errors import DataError, problem
from bytescale.data.sources.retry import unreadable, with_retries
from bytescale.data.sources.urls import UrlPath

BLOCK_TOKENS = 1 << 20
"""Tokens of a block, which is fetched in one request: 2 MiB of uint16 or 4 MiB of int32."""
_BLOCKS_PER_FOLDER = 1024
_FETCHED_AT_ONCE = 8


class RemoteTokens:
    """Offers what readers need of a memory map: ``dtype`` and ``tokens[first:stop]``. No file stays open."""

    def __init__(self, url: UrlPath, dtype: np.dtype, num_tokens: int, folder: Path, read_retries: int) -> None:
        """Fetch nothing yet.

        Args:
            url: URL of the ``.bin``.
            dtype: integer type of its tokens.
            num_tokens: number of tokens in it.
            folder: folder for the blocks. No other file, and no other version of this file, may use the folder.
            read_retries: how often a failing read is tried again.
        """
        self.dtype = dtype
        self._url = url
        self._num_tokens = num_tokens
        self._folder = folder
        self._read_retries = read_retries

    def __len__(self) -> int:
        return self._num_tokens

    def __getitem__(self, wanted: slice) -> NDArray[np.integer]:
        """Return tokens ``first`` to ``stop - 1``. Raises ``DataError`` if they cannot be fetched."""
        first, stop, step = wanted.indices(self._num_tokens)
        assert step == 1, "ranges of tokens have no gaps"
        blocks = range(first // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)) if first < stop else range(0)
        found = [np.zeros(0, self.dtype)]
        for block in blocks:
            begin = block * BLOCK_TOKENS
            start, end = max(first - begin, 0), min(stop - begin, BLOCK_TOKENS)
            found.append(np.fromfile(self._fetched(block), self.dtype, end - start, offset=start * self.dtype.itemsize))
        return np.concatenate(found)

    def fetch(self, starts: IntArray, stops: IntArray) -> None:
        """Fetch the blocks that token ranges ``starts[i]`` to ``stops[i]`` need, some at the same time.

        Raises ``DataError`` if one cannot be fetched.
        """
        needed = {
            block
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
            for block in range(start // BLOCK_TOKENS, -(-min(stop, self._num_tokens) // BLOCK_TOKENS))
        }
        missing = sorted(block for block in needed if not self._path(block).exists())
        if missing:
            with ThreadPoolExecutor(_FETCHED_AT_ONCE, thread_name_prefix="bytescale-fetch") as pool:
                list(pool.map(self._fetched, missing))

    def _path(self, block: int) -> Path:
        return self._folder / f"{block // _BLOCKS_PER_FOLDER:04d}" / f"{block:07d}.block"

    def _fetched(self, block: int) -> Path:
        """Return the file of a block. The block is fetched now if the file does not exist."""
        path = self._path(block)
        if path.exists():
            return path
        content = with_retries(partial(self._read, block), self._read_retries)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale_temporaries(path)
            with whole_file(path) as temporary:  # two processes that fetch the same block write the same content
                temporary.write_bytes(content)
        except OSError as error:
            raise DataError(
                problem(f"{path} cannot be written ({error})", fix="make room in data.cache_dir, or choose another")
            ) from error
        return path

    def _read(self, block: int) -> bytes:
        size = self.dtype.itemsize
        first, stop = block * BLOCK_TOKENS, min((block + 1) * BLOCK_TOKENS, self._num_tokens)
        try:
            content = self._url.read_range(first * size, stop * size)
            if len(content) != (stop - first) * size:
                reason = f"{len(content)} bytes came for {(stop - first) * size}"
                raise OSError(errno.EIO, reason, str(self._url))
        except OSError as error:
            raise unreadable(error, self._url) from error
        return content
