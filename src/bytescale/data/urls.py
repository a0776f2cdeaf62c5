"""Sources that are not in the local file system: anything that fsspec can open (s3://, hdfs://, http://, memory://).

``UrlPath`` stands where readers expect a ``Path``. Whatever a remote file system raises comes out as an ``OSError``
that names the URL (``data.filesystems``), so that retries and messages need to know one kind of failure only.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from bytescale.data.atomic import file_lock, temporary_path
from bytescale.data.filesystems import guarded, open_filesystem
from bytescale.data.sources import SourceFile

_COPY_BYTES = 8 * 1024**2
_VERSIONS = (  # what says that a file's content changed, the surest first; names as the file systems give them
    ("ETag", "etag", "md5Hash", "Content-MD5", "Digest"),
    ("modificationTime", "mtime", "Last-Modified", "LastModified", "last_modified", "updated"),
)


@dataclass(frozen=True, slots=True, order=True)
class UrlPath:
    """One remote file, with the few methods of ``Path`` that readers use."""

    url: str

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self._parts()[0]).name

    @property
    def suffix(self) -> str:
        """``.jsonl``."""
        return PurePosixPath(self._parts()[0]).suffix

    def absolute(self) -> UrlPath:
        """Itself."""
        return self

    def with_suffix(self, suffix: str) -> UrlPath:
        """The file beside it with another ending."""
        path, query = self._parts()
        return UrlPath(path.removesuffix(self.suffix) + suffix + query)

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """For reading bytes. Raises ``OSError``."""
        assert mode == "rb", "sources are only read"
        system, path = open_filesystem(self.url)
        return io.BufferedReader(_UrlReader(self.url, guarded(self.url, lambda: system.open(path, "rb"))), 1 << 20)

    def read_bytes(self) -> bytes:
        """All of it. Raises ``OSError``."""
        with self.open() as file:
            return file.read()

    def read_range(self, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop``, in one request. Raises ``OSError``."""
        system, path = open_filesystem(self.url)
        return guarded(self.url, lambda: system.cat_file(path, start=start, end=stop))

    def has_ranges(self) -> bool:
        """Whether a part of the file can be read without all of it, which plain web servers may not offer."""
        system, path = open_filesystem(self.url)
        return not _has_no_folders(self.url) or bool(guarded(self.url, lambda: system.info(path)).get("partial"))

    def describe(self, listed: Mapping[str, Any] | None = None) -> tuple[int, int]:
        """Size in bytes, and a number that changes with the content as far as the file system tells.

        Args:
            listed: what a listing said of the file, when there was one; saves a question.
        """
        system, path = open_filesystem(self.url)
        info = guarded(self.url, lambda: system.info(path)) if listed is None else listed
        if info["size"] is None:
            raise OSError(errno.EINVAL, "the server does not say how long the file is", self.url)
        told = next((found for names in _VERSIONS if (found := [info[name] for name in names if info.get(name)])), None)
        version = str(told) if told else guarded(self.url, lambda: str(system.ukey(path)))
        return int(info["size"]), int.from_bytes(hashlib.blake2b(version.encode(), digest_size=7).digest(), "big")

    def _parts(self) -> tuple[str, str]:
        """Everything up to a query, and the query, which may be part of a name elsewhere than in HTTP."""
        path, mark, query = self.url.partition("?" if self.url.startswith("http") else "\0")
        return path, mark + query

    def __str__(self) -> str:
        return self.url


def expand_url(source: str) -> Iterator[tuple[UrlPath, bool, Mapping[str, Any] | None]]:
    """The files of a URL (file, folder or glob), sorted; whether it names that very file; what a listing said of it.

    Raises:
        ConfigError: there is no file system for the URL.
        OSError: it cannot be reached, or there is nothing of that name.
    """
    system, path = open_filesystem(source)
    if _has_no_folders(source):
        yield UrlPath(source), True, None
        return
    guarded(source, system.invalidate_cache)  # a listing of earlier may be out of date
    if glob.has_magic(path):
        found = guarded(source, lambda: system.glob(path, detail=True))
        folder = re.split(r"[*?\[]", path)[0].rpartition("/")[0]
        files = {name: info for name, info in found.items() if info["type"] == "file" and not _is_hidden(name, folder)}
    else:
        info = guarded(source, lambda: system.info(path))
        if info["type"] == "file":
            yield UrlPath(source), True, info
            return
        found = guarded(source, lambda: system.find(path, detail=True))
        files = {name: info for name, info in found.items() if not _is_hidden(name, path)}
        if not found:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", source)
    yield from ((UrlPath(_url_of(name, system, source, path)), False, files[name]) for name in sorted(files))


def _has_no_folders(source: str) -> bool:
    """HTTP: a URL is a file, and ``?`` and ``*`` are letters."""
    return source.startswith(("http://", "https://"))


def local_pair(file: SourceFile, cache_dir: Path) -> SourceFile:
    """``file`` itself, or a copy of a remote ``.bin/.idx`` pair in the cache. Raises ``OSError``."""
    if not isinstance(file.path, UrlPath):
        return file
    copy = local_index(file, cache_dir)
    with file_lock(copy.with_suffix(".lock")):
        if not copy.exists():
            _fetch(file.path, copy)
    return replace(file, path=copy)


def local_index(file: SourceFile, cache_dir: Path) -> Path:
    """Where a copy of a remote ``.bin`` is or will be; what lies beside it has been copied. Raises ``OSError``."""
    path = file.path
    assert isinstance(path, UrlPath), f"{path} is here"
    key = hashlib.blake2b(f"{path}\0{file.num_bytes}\0{file.mtime_ns}".encode(), digest_size=8).hexdigest()
    copy = cache_dir / "fetched" / f"{key}.bin"
    with file_lock(copy.with_suffix(".lock")):
        if not copy.with_suffix(".idx").exists():
            # What says how the pair was made; few have it, and where listing is forbidden no says 403.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                _fetch(path.with_suffix(".meta.json"), copy.with_suffix(".meta.json"))
            _fetch(path.with_suffix(".idx"), copy.with_suffix(".idx"))
    return copy


def _fetch(source: UrlPath, target: Path) -> None:
    temporary = temporary_path(target)
    try:
        with source.open() as remote, temporary.open("wb") as local:
            while block := remote.read(_COPY_BYTES):
                local.write(block)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _url_of(name: str, system: Any, source: str, path: str) -> str:
    """The URL of ``name``, which a listing of ``source`` gave, ``path`` being ``source`` as the file system has it.

    Some file systems (webhdfs, hdfs, sftp) leave the host out of their paths; ``unstrip_protocol`` cannot know it.
    """
    scheme, _, rest = source.partition("://")
    host, _, behind = rest.partition("/")
    if "::" in source or not host or path.strip("/") != behind.strip("/"):
        return str(system.unstrip_protocol(name))
    return f"{scheme}://{host}/{name.lstrip('/')}"


def _is_hidden(name: str, folder: str) -> bool:
    inside = name.strip("/").removeprefix(folder.strip("/"))
    return any(part.startswith(".") for part in PurePosixPath(inside).parts)


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
        return guarded(self._url, lambda: self._file.seek(offset, whence))

    def tell(self) -> int:
        return guarded(self._url, self._file.tell)

    def readinto(self, buffer: Any) -> int:
        data = guarded(self._url, lambda: self._file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
