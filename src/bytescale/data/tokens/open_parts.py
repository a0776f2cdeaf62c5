"""Access to the tokens of the parts of a corpus. Each part on this machine is memory-mapped while it is in use.

The tokens of a ``.bin`` that lies on another machine are fetched in blocks when they are read, and the blocks are kept
in the cache folder. So nobody copies a corpus of terabytes before the first step: a server fetches the blocks that are
dealt to it (``data.remote.server.PartOwners``), and a local loader those that hold its rank's slices.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.atomic import file_lock, remove_stale_temporaries, whole_file
from bytescale.common.errors import DataError
from bytescale.data.sources.files import SourceFile
from bytescale.data.tokens.indexed import Tokens
from bytescale.storage.place import Url
from bytescale.storage.retry import unreadable, with_retries

BLOCK_TOKENS = 1 << 20
"""Tokens of a block, which is fetched in one request: 2 MiB of uint16 or 4 MiB of int32."""
_BLOCKS_PER_FOLDER = 1024
_FETCHED_AT_ONCE = 8
_COPY_BYTES = 8 * 1024**2


class RemoteTokens:
    """Offers what readers need of a memory map: ``dtype`` and ``tokens[first:stop]``. No file stays open."""

    def __init__(self, url: Url, dtype: np.dtype, num_tokens: int, folder: Path, read_retries: int) -> None:
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
                f"{path} cannot be written ({error})", fix="make room in data.cache_dir, or choose another"
            ) from error
        return path

    def _read(self, block: int) -> bytes:
        size = self.dtype.itemsize
        first, stop = block * BLOCK_TOKENS, min((block + 1) * BLOCK_TOKENS, self._num_tokens)
        try:
            content = self._url.read(first * size, stop * size)
            if len(content) != (stop - first) * size:
                reason = f"{len(content)} bytes came for {(stop - first) * size}"
                raise OSError(errno.EIO, reason, str(self._url))
        except OSError as error:
            raise unreadable(error, self._url) from error
        return content


def local_pair(file: SourceFile, cache_dir: Path, fields: Sequence[str] = ()) -> SourceFile:
    """Return ``file`` if it is local, else a copy of the remote ``.bin/.idx`` pair in the cache.

    Raises ``UnreadableError``.
    """
    if not isinstance(file.path, Url):
        return file
    try:
        copy = local_index(file, cache_dir, fields)
        with file_lock(copy.with_suffix(".lock")):
            if not copy.exists():
                _fetch(file.path, copy)
    except OSError as error:
        raise unreadable(error, file.path) from error
    return replace(file, path=copy)


def local_index(file: SourceFile, cache_dir: Path, fields: Sequence[str] = ()) -> Path:
    """Copy the ``.idx`` of a remote ``.bin`` into the cache, and its ``.meta.json`` if there is one.

    Those pairs ``PREFIX.FIELD.bin/.idx`` that exist are copied as a whole. Returns the path that the copy of the
    ``.bin`` has or would have. Raises ``OSError``.
    """
    path = file.path
    assert isinstance(path, Url), f"{path} is here"
    described = "\0".join(
        [str(path), str(file.num_bytes), str(file.mtime_ns), *fields, *_versions_beside(path, fields)]
    )
    key = hashlib.blake2b(described.encode(), digest_size=8).hexdigest()
    copy = cache_dir / "fetched" / f"{key}.bin"
    with file_lock(copy.with_suffix(".lock")):
        if not copy.with_suffix(".idx").exists():
            # The .meta.json says how the pair was made. Few pairs have one, and S3 answers 403 for a missing file if
            # listing is forbidden.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                _fetch(path.with_suffix(".meta.json"), copy.with_suffix(".meta.json"))
            for name in fields:
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    _fetch(path.with_suffix(f".{name}.bin"), copy.with_suffix(f".{name}.bin"))
                    _fetch(path.with_suffix(f".{name}.idx"), copy.with_suffix(f".{name}.idx"))
            _fetch(path.with_suffix(".idx"), copy.with_suffix(".idx"))
    return copy


def _versions_beside(path: Url, fields: Sequence[str]) -> list[str]:
    """Sizes and versions of what belongs to a ``.bin``: other weights may have the same tokens. Raises ``OSError``."""
    found = []
    for ending in (".idx", *(f".{name}{part}" for name in fields for part in (".bin", ".idx"))):
        try:
            found.append(str(path.with_suffix(ending).describe()))
        except (FileNotFoundError, PermissionError):
            found.append("none")
        except OSError as error:
            if error.errno != errno.EINVAL:  # the server does not tell the size
                raise
            found.append("unknown")
    return found


def _fetch(source: Url, target: Path) -> None:
    """Copy a file. The caller holds the lock of the pair."""
    remove_stale_temporaries(target, locked=True)
    with whole_file(target) as temporary, source.open() as remote, temporary.open("wb") as local:
        while block := remote.read(_COPY_BYTES):
            local.write(block)


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
