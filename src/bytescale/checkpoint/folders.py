"""A checkpoint's folder, on this machine's file system or behind a URL, to be read (``upload`` writes behind URLs)."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from bytescale.common.errors import CheckpointError, problem
from bytescale.data.sources import retry
from bytescale.data.sources.filesystems import credentials_hint, guarded, open_filesystem

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

RETRIES = 4
ANSWER_SECONDS = 45.0
"""A request to a store is given up after so many seconds: two tries of its client, of 20 s each."""
_HOPELESS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class Folder(Protocol):
    """What reading a checkpoint needs. All methods raise ``OSError``."""

    merges_bytes: int
    """Reads of neighbouring ranges are joined up to so many bytes; 0: there is nothing to gain."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        ...

    def sizes(self) -> dict[str, int]:
        """The files in it, with their bytes."""
        ...

    def folders(self) -> list[str]:
        """Names of the folders in it."""
        ...

    def read_file(self, name: str) -> bytes:
        """Return the whole content of a file."""
        ...

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        """Fill ``target`` from a file. Returns the number of bytes, fewer only at the file's end."""
        ...

    def inside(self, name: str) -> Folder:
        """A folder in this one."""
        ...


def open_folder(place: str | Path) -> Folder:
    """The folder at a path or URL; nothing is read yet."""
    return UrlFolder(str(place).rstrip("/")) if is_url(place) else LocalFolder(Path(place).expanduser())


def is_url(place: str | Path) -> bool:
    """Whether ``place`` is a URL, which a ``Path`` cannot be."""
    return isinstance(place, str) and "://" in place


class LocalFolder:
    """A folder of the local file system. The file that was read last stays open, for the next of its many pieces."""

    merges_bytes = 0

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open_name = ""
        self._open_file: Any = None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self.path.iterdir() if path.is_file()}

    def folders(self) -> list[str]:
        return [path.name for path in self.path.iterdir() if path.is_dir()] if self.path.is_dir() else []

    def read_file(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if self._open_name != name:
            self._open_name, self._open_file = name, (self.path / name).open("rb", buffering=0)
        filled = 0
        while filled < len(target):
            count = os.preadv(self._open_file.fileno(), [target[filled:]], offset + filled)
            if not count:
                break
            filled += count
        return filled

    def inside(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def __str__(self) -> str:
        return str(self.path)


class UrlFolder:
    """A folder of any file system that fsspec knows. What fails is tried again some times."""

    merges_bytes = 32 * 2**20

    def __init__(self, url: str) -> None:
        """Raises ``ConfigError`` if there is no file system for ``url``, or its package is not installed."""
        self.url = url
        self.system, self._path = open_filesystem(url)

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def sizes(self) -> dict[str, int]:
        return {name: info["size"] for name, info in self._listed().items() if info["type"] == "file"}

    def folders(self) -> list[str]:
        return [name for name, info in self._listed().items() if info["type"] == "directory"]

    def read_file(self, name: str) -> bytes:
        return tried(self.url_of(name), lambda: self.system.cat_file(self.path_of(name)))

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if not len(target):
            return 0
        path, stop = self.path_of(name), offset + len(target)
        content: bytes = tried(self.url_of(name), lambda: self.system.cat_file(path, start=offset, end=stop))
        target[: len(content)] = content
        return len(content)

    def inside(self, name: str) -> UrlFolder:
        return UrlFolder(self.url_of(name))

    def url_of(self, name: str) -> str:
        """URL of a file in this folder."""
        return f"{self.url}/{name}"

    def path_of(self, name: str) -> str:
        """What the file system calls a file in this folder."""
        return f"{self._path}/{name}"

    def _listed(self) -> dict[str, dict]:
        try:
            found = tried(self.url, lambda: self.system.ls(self._path, detail=True, refresh=True))
        except FileNotFoundError:  # object stores have no empty folders
            return {}
        own = self._path.rstrip("/")
        return {info["name"].rstrip("/").rpartition("/")[2]: info for info in found if info["name"].rstrip("/") != own}

    def __str__(self) -> str:
        return self.url


def tried(
    url: str,
    action: Callable[[], Result],
    sleep: Callable[[float], None] = time.sleep,
    *,
    seconds: float = ANSWER_SECONDS,
) -> Result:
    """``action()``, tried again some times. Its errors are ``OSError``; a file that is missing is not tried again.

    Each try is given up after ``seconds``, because not every file system has time limits of its own. No new try begins
    when so much time has passed in all.
    """
    began = time.monotonic()
    for attempt in range(RETRIES + 1):
        try:
            return guarded(url, lambda: _within(seconds, action))
        except OSError as error:
            is_late = time.monotonic() - began >= seconds
            if isinstance(error, _HOPELESS) or attempt == RETRIES or is_late:
                raise
            pause = retry.FIRST_PAUSE_SECONDS * 2**attempt
            logger.warning(
                "%s: %s. Trying again in %.1f s (%d of %d).", url, error.strerror, pause, attempt + 1, RETRIES
            )
            sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _within(seconds: float, action: Callable[[], Result]) -> Result:
    """``action()``. Raises ``TimeoutError`` after ``seconds``; the thread that is stuck ends with the process."""
    future = in_a_thread(action)
    if not wait([future], seconds).done:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {seconds:.0f} s")
    return future.result()


def in_a_thread(action: Callable[[], Result]) -> Future[Result]:
    """The outcome of ``action``, which ends with the process: a run that fails does not wait for a slow store."""
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # raised by `future.result()`
            future.set_exception(error)

    threading.Thread(target=work, name="bytescale-store", daemon=True).start()
    return future


def unreachable(error: OSError, place: object) -> CheckpointError:
    """The error for a store, or a disk, that does not give or take a file."""
    where = error.filename or place
    fix = "mend it, then run the same command again"
    if isinstance(where, str) and "://" in where:
        fix = (
            f"check the URL, the network and the credentials{credentials_hint(where)}, then run the same command again"
        )
    return CheckpointError(problem(f"{where} cannot be reached ({error.strerror or error})", fix=fix))
