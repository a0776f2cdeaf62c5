"""Places of files and folders: a ``Path`` on this machine, or a ``Url`` that fsspec can open (s3://, hdfs://, ...).

Methods of ``Url`` that ``Path`` has too make one attempt, because those who read a stream have to begin again as a
whole. All others try again some times by themselves.
"""

from __future__ import annotations

import errno
import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from bytescale.common.errors import typed_path
from bytescale.common.parsing import read_input
from bytescale.storage.filesystems import guarded, open_filesystem
from bytescale.storage.retry import ANSWER_SECONDS, tried

Result = TypeVar("Result")

_VERSIONS = (  # entries by which file systems tell that a file's content has changed, the most reliable ones first
    ("ETag", "etag", "md5Hash", "Content-MD5", "Digest"),
    ("modificationTime", "mtime", "Last-Modified", "LastModified", "last_modified", "updated"),
)


@dataclass(frozen=True, slots=True, order=True)
class Url:
    """A file or folder behind a URL, with those methods of ``Path`` that readers use."""

    url: str

    @property
    def name(self) -> str:
        return PurePosixPath(self._parts()[0]).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self._parts()[0]).suffix

    def absolute(self) -> Url:
        return self

    def with_suffix(self, suffix: str) -> Url:
        """Return the file in the same folder with another ending."""
        path, query = self._parts()
        return Url(path.removesuffix(self.suffix) + suffix + query)

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open the file for reading bytes. Raises ``OSError``."""
        assert mode == "rb", "sources are only read"
        system, path = open_filesystem(self.url)
        return io.BufferedReader(_UrlReader(self.url, guarded(self.url, lambda: system.open(path, "rb"))), 1 << 20)

    def read_bytes(self) -> bytes:
        """Read the whole file. Raises ``OSError``."""
        with self.open() as file:
            return file.read()

    def read(self, start: int, stop: int) -> bytes:
        """Read bytes ``start`` to ``stop - 1`` in one request. Raises ``OSError``."""
        system, path = open_filesystem(self.url)
        return guarded(self.url, lambda: system.cat_file(path, start=start, end=stop))

    def has_ranges(self) -> bool:
        """Return whether a part of the file can be read without the rest, which not every web server offers."""
        system, path = open_filesystem(self.url)
        return not has_no_folders(self.url) or bool(guarded(self.url, lambda: system.info(path)).get("partial"))

    def describe(self, listed: Mapping[str, Any] | None = None) -> tuple[int, int]:
        """Return the size in bytes, and a number that changes when the file system reports changed content.

        ``listed`` is the entry of the file in a listing, which saves a request. Raises ``OSError``, also for an unknown
        size.
        """
        system, path = open_filesystem(self.url)
        info = guarded(self.url, lambda: system.info(path)) if listed is None else listed
        if info["size"] is None:
            raise OSError(errno.EINVAL, "the server does not say how long the file is", self.url)
        told = next((found for names in _VERSIONS if (found := [info[name] for name in names if info.get(name)])), None)
        version = str(told) if told else guarded(self.url, lambda: str(system.ukey(path)))
        return int(info["size"]), int.from_bytes(hashlib.blake2b(version.encode(), digest_size=7).digest(), "big")

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.url}/{name}")

    def write_bytes(self, content: bytes) -> None:
        """Write a small file. Raises ``OSError``."""
        self._tried(lambda system, path: system.pipe_file(path, content))

    def put(self, source: Path, seconds: float) -> None:
        """Copy a local file to this URL. Each try may take ``seconds``. Raises ``OSError``."""

        def put(system: Any, path: str) -> None:
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
            system.put_file(str(source), path)

        self._tried(put, seconds)

    def remove(self) -> None:
        """Delete the file. Raises ``OSError``."""
        self._tried(lambda system, path: system.rm_file(path))

    def _tried(self, request: Callable[[Any, str], Result], seconds: float = ANSWER_SECONDS) -> Result:
        system, path = open_filesystem(self.url)
        return tried(self.url, lambda: request(system, path), seconds=seconds)

    def _parts(self) -> tuple[str, str]:
        """Split an HTTP URL into the path and the query. Other URLs have no query: there ``?`` belongs to the name."""
        path, mark, query = self.url.partition("?" if self.url.startswith("http") else "\0")
        return path, mark + query

    def __str__(self) -> str:
        return self.url


Place = Path | Url


def is_url(place: object) -> bool:
    """Return whether ``place`` is a URL, as a text or as a ``Url``."""
    return isinstance(place, Url) or (isinstance(place, str) and "://" in place)


def place_at(place: str | Place) -> Place:
    """Return the path or URL that ``place`` names. Raises ``ConfigError`` if there is no file system for a URL."""
    if not isinstance(place, str):
        return place
    if not is_url(place):
        return typed_path(place)
    url = Url(place.rstrip("/"))
    open_filesystem(url.url)
    return url


def has_no_folders(url: str) -> bool:
    """Return whether the protocol is HTTP. There every URL is a file, and ``?`` and ``*`` are ordinary characters."""
    return url.startswith(("http://", "https://"))


def file_sizes(folder: Place) -> dict[str, int]:
    """Return the names of the files in a folder, which need not exist behind a URL, with their bytes."""
    if isinstance(folder, Path):
        return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    return {name: int(info["size"]) for name, info in _listed(folder).items() if info["type"] == "file"}


def folders_in(folder: Place) -> list[str]:
    """Return the names of the folders in a folder, which need not exist. Raises ``OSError``."""
    if isinstance(folder, Path):
        return [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return [name for name, info in _listed(folder).items() if info["type"] == "directory"]


def read_file(file: Place) -> bytes:
    """Return the whole content of a file. Raises ``OSError``."""
    if isinstance(file, Path):
        return read_input(file, 2**30)
    return file._tried(lambda system, path: system.cat_file(path))


def read_into(file: Place, offset: int, target: memoryview) -> int:
    """Fill ``target`` with a file's bytes from ``offset`` on. Returns their number. Raises ``OSError``."""
    if not len(target):
        return 0
    if isinstance(file, Url):
        stop = offset + len(target)
        content: bytes = file._tried(lambda system, path: system.cat_file(path, start=offset, end=stop))
        target[: len(content)] = content
        return len(content)
    if file.exists() and not file.is_file():
        raise OSError(errno.ENXIO, "it is no regular file", str(file))
    filled = 0
    with file.open("rb", buffering=0) as opened:
        opened.seek(offset)
        while count := opened.readinto(target[filled:]):
            filled += count
    return filled


def _listed(folder: Url) -> dict[str, dict]:
    path = open_filesystem(folder.url)[1].rstrip("/")
    try:
        found = folder._tried(lambda system, path: system.ls(path, detail=True, refresh=True))
    except FileNotFoundError:  # object stores have no empty folders
        return {}
    return {info["name"].rstrip("/").rpartition("/")[2]: info for info in found if info["name"].rstrip("/") != path}


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
