"""Sources that are not in the local file system: anything that fsspec can open (s3://, hdfs://, http://, memory://).

``UrlPath`` stands where readers expect a ``Path``. Whatever a remote file system raises comes out as an ``OSError``
that names the URL, so that retries and messages need to know one kind of failure only.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec

from bytescale.common.errors import ConfigError, problem
from bytescale.data.atomic import file_lock, temporary_path
from bytescale.data.sources import SourceFile

Result = TypeVar("Result")

_COPY_BYTES = 8 * 1024**2


@dataclass(frozen=True, slots=True, order=True)
class UrlPath:
    """One remote file, with the few methods of ``Path`` that readers use."""

    url: str

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        """``.jsonl``."""
        return PurePosixPath(self.url).suffix

    def absolute(self) -> UrlPath:
        """Itself."""
        return self

    def with_suffix(self, suffix: str) -> UrlPath:
        """The file beside it with another ending."""
        return UrlPath(self.url.removesuffix(self.suffix) + suffix)

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """For reading bytes. Raises ``OSError``."""
        assert mode == "rb", "sources are only read"
        system, path = _system(self.url)
        return io.BufferedReader(_UrlReader(self.url, _guarded(self.url, lambda: system.open(path, "rb"))), 1 << 20)

    def read_bytes(self) -> bytes:
        """All of it. Raises ``OSError``."""
        with self.open() as file:
            return file.read()

    def describe(self) -> tuple[int, int]:
        """Size in bytes, and a number that changes with the content as far as the file system tells."""
        system, path = _system(self.url)
        size = _guarded(self.url, lambda: system.info(path)["size"])
        version = _guarded(self.url, lambda: str(system.ukey(path)))
        if size is None:
            raise OSError(errno.EINVAL, "the server does not say how long the file is", self.url)
        return int(size), int.from_bytes(hashlib.blake2b(version.encode(), digest_size=7).digest(), "big")

    def __str__(self) -> str:
        return self.url


def expand_url(source: str) -> Iterator[tuple[UrlPath, bool]]:
    """The files of a URL (file, folder or glob), sorted, and whether it names that very file. Raises ``OSError``.

    Raises:
        ConfigError: there is no file system for the URL.
    """
    system, path = _system(source)
    if glob.has_magic(path) and not source.startswith("http"):
        found = _guarded(source, lambda: system.glob(path))
        yield from ((UrlPath(system.unstrip_protocol(name)), False) for name in sorted(found))
    elif source.startswith("http") or _guarded(source, lambda: system.isfile(path)):
        yield UrlPath(source), True
    else:
        found = _guarded(source, lambda: system.find(path)) if _guarded(source, lambda: system.isdir(path)) else []
        if not found:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", source)
        yield from ((UrlPath(system.unstrip_protocol(name)), False) for name in sorted(found) if not _is_hidden(name))


def local_pair(file: SourceFile, cache_dir: Path) -> SourceFile:
    """``file`` itself, or a copy of a remote ``.bin/.idx`` pair in the cache. Raises ``OSError``."""
    path = file.path
    if not isinstance(path, UrlPath):
        return file
    key = hashlib.blake2b(f"{path}\0{file.num_bytes}\0{file.mtime_ns}".encode(), digest_size=8).hexdigest()
    copy = cache_dir / "fetched" / f"{key}.bin"
    with file_lock(copy.with_suffix(".lock")):
        for ending in (".bin", ".idx"):
            if not copy.with_suffix(ending).exists():
                _fetch(path.with_suffix(ending), copy.with_suffix(ending))
    return replace(file, path=copy)


def _fetch(source: UrlPath, target: Path) -> None:
    temporary = temporary_path(target)
    try:
        with source.open() as remote, temporary.open("wb") as local:
            while block := remote.read(_COPY_BYTES):
                local.write(block)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _system(url: str) -> tuple[Any, str]:
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ConfigError(
            problem(
                f"data source {url!r} needs a package that is not installed ({error})",
                fix="install it (s3:// s3fs, gs:// gcsfs, hdfs:// pyarrow with libhdfs, http:// aiohttp)",
            )
        ) from error
    except ValueError as error:
        raise ConfigError(
            problem(f"data source {url!r} has no file system ({error})", fix="use a protocol that fsspec knows")
        ) from error


def _guarded(url: str, action: Callable[[], Result]) -> Result:
    """``action()``, with whatever a remote file system raises as an ``OSError`` that names ``url``."""
    try:
        return action()
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise _named(error, url) from error
        raise
    except Exception as error:  # aiohttp, botocore, ...: each with its own kinds
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", url) from error


def _named(error: OSError, url: str) -> OSError:
    """``error`` with its reason and ``url``. To fsspec, every failing HTTP file is one that is not there."""
    cause, status = error.__cause__, getattr(error.__cause__, "status", None)
    if isinstance(error, FileNotFoundError) and cause is not None and status not in (404, 410):
        kind = PermissionError if status in (401, 403) else OSError
        return kind(errno.EACCES if kind is PermissionError else errno.EIO, f"{type(cause).__name__}: {cause}", url)
    text = str(error)
    reason = os.strerror(error.errno or errno.ENOENT) if isinstance(error, FileNotFoundError) else text
    return type(error)(error.errno or errno.EIO, reason or type(error).__name__, url)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


class _UrlReader(io.RawIOBase):
    """An open remote file whose failures are ``OSError``."""

    def __init__(self, url: str, file: Any) -> None:
        self._url = url
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return _guarded(self._url, lambda: self._file.seek(offset, whence))

    def tell(self) -> int:
        return _guarded(self._url, self._file.tell)

    def readinto(self, buffer: Any) -> int:
        data = _guarded(self._url, lambda: self._file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
