"""Sources that are not in the local file system: anything that fsspec can open (s3://, hdfs://, http://, memory://).

A ``UrlPath`` takes the place of the ``Path`` that readers expect. Every error of a remote file system becomes an
``OSError`` that names the URL (``data.sources.filesystems``), so that retries and messages deal with one kind of
failure only.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from bytescale.common.atomic import file_lock, remove_stale_temporaries, whole_file
from bytescale.common.errors import ConfigError, problem
from bytescale.data.sources.filesystems import guarded, open_filesystem
from bytescale.data.sources.source_file import SourceFile

_COPY_BYTES = 8 * 1024**2
_VERSIONS = (  # entries by which file systems tell that a file's content has changed, the most reliable ones first
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
        """The ending of the path, such as ``.jsonl``."""
        return PurePosixPath(self._parts()[0]).suffix

    def absolute(self) -> UrlPath:
        """Return this object: a URL is absolute."""
        return self

    def with_suffix(self, suffix: str) -> UrlPath:
        """Return the file in the same folder with another ending."""
        path, query = self._parts()
        return UrlPath(path.removesuffix(self.suffix) + suffix + query)

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open the file for reading bytes. Raises ``OSError``."""
        assert mode == "rb", "sources are only read"
        system, path = open_filesystem(self.url)
        return io.BufferedReader(_UrlReader(self.url, guarded(self.url, lambda: system.open(path, "rb"))), 1 << 20)

    def read_bytes(self) -> bytes:
        """Read the whole file. Raises ``OSError``."""
        with self.open() as file:
            return file.read()

    def read_range(self, start: int, stop: int) -> bytes:
        """Read bytes ``start`` to ``stop - 1`` in one request. Raises ``OSError``."""
        system, path = open_filesystem(self.url)
        return guarded(self.url, lambda: system.cat_file(path, start=start, end=stop))

    def has_ranges(self) -> bool:
        """Return whether a part of the file can be read without the rest, which not every web server offers."""
        system, path = open_filesystem(self.url)
        return not _has_no_folders(self.url) or bool(guarded(self.url, lambda: system.info(path)).get("partial"))

    def describe(self, listed: Mapping[str, Any] | None = None) -> tuple[int, int]:
        """Return the size in bytes, and a number that changes when the file system reports changed content.

        Args:
            listed: the entry of the file in a listing, if there was a listing. It saves a request.

        Raises:
            OSError: the file system does not answer, or does not know the size.
        """
        system, path = open_filesystem(self.url)
        info = guarded(self.url, lambda: system.info(path)) if listed is None else listed
        if info["size"] is None:
            raise OSError(errno.EINVAL, "the server does not say how long the file is", self.url)
        told = next((found for names in _VERSIONS if (found := [info[name] for name in names if info.get(name)])), None)
        version = str(told) if told else guarded(self.url, lambda: str(system.ukey(path)))
        return int(info["size"]), int.from_bytes(hashlib.blake2b(version.encode(), digest_size=7).digest(), "big")

    def _parts(self) -> tuple[str, str]:
        """Split an HTTP URL into the path and the query. Other URLs have no query: there ``?`` belongs to the name."""
        path, mark, query = self.url.partition("?" if self.url.startswith("http") else "\0")
        return path, mark + query

    def __str__(self) -> str:
        return self.url


def expand_url(source: str) -> Iterator[tuple[UrlPath, bool, Mapping[str, Any] | None]]:
    """Yield the files of a URL (a file, a folder or a glob), sorted.

    Each item is the file, whether ``source`` names this very file, and the file's entry in a listing if there was one.

    Raises:
        ConfigError: there is no file system for the URL, or the file system would misread a ``?`` in it.
        OSError: the URL cannot be reached, or nothing has that name.
    """
    system, path = open_filesystem(source)
    if _has_no_folders(source):
        yield UrlPath(source), True, None
        return
    if "?" in source and "?" not in path:
        raise ConfigError(
            problem(
                f"data source {source!r}: its file system reads everything behind ? as options",
                so="the whole folder would be read",
                fix="use * or [abc] instead of ?",
            )
        )
    guarded(source, system.invalidate_cache)  # an earlier listing may be out of date
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
    """Return whether the protocol is HTTP. There every URL is a file, and ``?`` and ``*`` are ordinary characters."""
    return source.startswith(("http://", "https://"))


def local_pair(file: SourceFile, cache_dir: Path, fields: Sequence[str] = ()) -> SourceFile:
    """Return ``file`` if it is local, else a copy of the remote ``.bin/.idx`` pair in the cache. Raises ``OSError``."""
    if not isinstance(file.path, UrlPath):
        return file
    copy = local_index(file, cache_dir, fields)
    with file_lock(copy.with_suffix(".lock")):
        if not copy.exists():
            _fetch(file.path, copy)
    return replace(file, path=copy)


def local_index(file: SourceFile, cache_dir: Path, fields: Sequence[str] = ()) -> Path:
    """Copy the ``.idx`` of a remote ``.bin`` into the cache, and its ``.meta.json`` if there is one.

    Those pairs ``PREFIX.FIELD.bin/.idx`` that exist are copied as a whole. Returns the path that the copy of the
    ``.bin`` has or would have. Raises ``OSError``.
    """
    path = file.path
    assert isinstance(path, UrlPath), f"{path} is here"
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


def _versions_beside(path: UrlPath, fields: Sequence[str]) -> list[str]:
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


def _fetch(source: UrlPath, target: Path) -> None:
    """Copy a file. The caller holds the lock of the pair."""
    remove_stale_temporaries(target, locked=True)
    with whole_file(target) as temporary, source.open() as remote, temporary.open("wb") as local:
        while block := remote.read(_COPY_BYTES):
            local.write(block)


def _url_of(name: str, system: Any, source: str, path: str) -> str:
    """Return the URL of ``name``, a path from a listing of ``source``. The file system calls ``source`` ``path``.

    Some file systems (webhdfs, hdfs, sftp) leave the host out of their paths, so ``unstrip_protocol`` cannot restore
    it. The host is then taken from ``source``.
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
    """An open remote file. All its errors are ``OSError``."""

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
