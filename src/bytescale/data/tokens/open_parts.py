"""Access to the tokens of the parts of a corpus. Each part on this machine is memory-mapped while it is in use.

Of a large ``.bin`` that lies on another machine, ranges of tokens are read when they are asked for. So nobody copies a
corpus of terabytes before the first step, and nobody needs room for it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.atomic import file_lock, remove_stale_temporaries, whole_file
from bytescale.data.sources.files import SourceFile
from bytescale.data.tokens.indexed import Tokens
from bytescale.storage.place import Url
from bytescale.storage.retry import unreadable, with_retries

_READ_AT_ONCE = 16
"""Ranges of remote files that are read at the same time."""
_COPY_BYTES = 8 * 1024**2


class RemoteTokens:
    """Offers what readers need of a memory map: ``dtype`` and ``tokens[first:stop]``. No file stays open."""

    def __init__(self, url: Url, dtype: np.dtype, num_tokens: int) -> None:
        self.dtype = dtype
        self._url = url
        self._num_tokens = num_tokens

    def __getitem__(self, wanted: slice) -> NDArray[np.integer]:
        """Return tokens ``first`` to ``stop - 1``. Raises ``DataError`` if they cannot be read."""
        first, stop, _ = wanted.indices(self._num_tokens)
        content = with_retries(partial(self._read, first, stop)) if first < stop else b""
        return np.frombuffer(content, self.dtype)

    def _read(self, first: int, stop: int) -> bytes:
        size = self.dtype.itemsize
        try:
            content = self._url.read(first * size, stop * size)
            if len(content) != (stop - first) * size:
                reason = f"{len(content)} bytes came for {(stop - first) * size}"
                raise OSError(errno.EIO, reason, str(self._url))
        except OSError as error:
            raise unreadable(error, self._url) from error
        return content


def local_copy(
    file: SourceFile, cache_dir: Path, fields: Sequence[str] = (), *, whole: bool = False
) -> tuple[Path, bool]:
    """Copy into the cache what belongs to a remote ``.bin``: its ``.idx``, its ``.meta.json``, and pairs of ``fields``.

    With ``whole``, the ``.bin`` too. Returns the path that its copy has or would have, and whether ranges of it can be
    read where it is. Raises ``UnreadableError``.
    """
    path = file.path
    assert isinstance(path, Url), f"{path} is here"
    try:
        content = [str(path), str(file.num_bytes), str(file.mtime_ns), *fields, *_versions_beside(path, fields)]
        key = hashlib.blake2b("\0".join(content).encode(), digest_size=8).hexdigest()
        copy = cache_dir / "fetched" / f"{key}.bin"
        with file_lock(copy.with_suffix(".lock")):
            if not copy.with_suffix(".idx").exists():
                # The .meta.json says how the pair was made. Few pairs have one, and S3 answers 403 for a missing file
                # if listing is forbidden.
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    _fetch(path.with_suffix(".meta.json"), copy.with_suffix(".meta.json"))
                for name in fields:
                    with contextlib.suppress(FileNotFoundError, PermissionError):
                        _fetch(path.with_suffix(f".{name}.bin"), copy.with_suffix(f".{name}.bin"))
                        _fetch(path.with_suffix(f".{name}.idx"), copy.with_suffix(f".{name}.idx"))
                _fetch(path.with_suffix(".idx"), copy.with_suffix(".idx"))
            if whole and not copy.exists():
                _fetch(path, copy)
        return copy, not whole and path.has_ranges()
    except OSError as error:
        raise unreadable(error, path) from error


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

MOST_OPEN = 128
"""Parts that are open at the same time. A window rarely has more.

Each memory map takes a file handle, of which a process has about a thousand by default.
"""


class PartReader(Protocol):
    """Gives ranges of the tokens of a corpus."""

    restarts: int
    """How often who reads for this process was restarted."""

    def slices(self, parts: IntArray, places: IntArray, counts: IntArray) -> list[Slice]:
        """Return ``counts[i]`` tokens from ``places[i]`` on in part ``parts[i]``, with fields.

        All arguments are int64 ``[N]``. Raises ``DataError`` if a range cannot be read.
        """


class OpenParts:
    """Maps a part when it is first asked for, and closes the least recently used ones when too many are open."""

    restarts = 0

    def __init__(self, open_part: Callable[[int], tuple[Tokens, Mapping[str, Tokens]]]) -> None:
        """``open_part``: from the number of a part to its tokens and fields, 1-D. Views of a closed part stay valid."""

        @lru_cache(MOST_OPEN)
        def opened(part: int) -> tuple[Tokens, Mapping[str, Tokens]]:
            tokens, fields = open_part(part)
            return _plain(tokens), {name: _plain(values) for name, values in fields.items()}

        self._opened = opened

    def slices(self, parts: IntArray, places: IntArray, counts: IntArray) -> list[Slice]:
        """Return views where possible. See ``PartReader``."""
        found: list[tuple[Any, Mapping[str, NDArray]]] = []
        with ThreadPoolExecutor(_READ_AT_ONCE, thread_name_prefix="bytescale-fetch") as pool:
            for part, place, count in zip(parts.tolist(), places.tolist(), counts.tolist(), strict=True):
                tokens, fields = self._opened(part)
                own = slice(place, place + count)
                values = pool.submit(tokens.__getitem__, own) if isinstance(tokens, RemoteTokens) else tokens[own]
                found.append((values, {name: numbers[own] for name, numbers in fields.items()}))
        return [(values.result() if isinstance(values, Future) else values, fields) for values, fields in found]

    def __getitem__(self, part: int) -> Tokens:
        return self._opened(part)[0]


def _plain(tokens: Tokens) -> Tokens:
    """Return a memory map as an array, because slices of a memmap cost 2 us more."""
    return tokens.view(np.ndarray) if isinstance(tokens, np.memmap) else tokens
