"""Files that appear whole or not at all, and a lock that dies with its holder."""

from __future__ import annotations

import errno
import fcntl
import glob
import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from bytescale.common.errors import DataError

logger = logging.getLogger(__name__)

STOPPED_SECONDS = 15.0
"""So long a stopped process may hold a lock that others wait for."""
_LOOK_SECONDS = 0.1
_TEMPORARY = re.compile(r"\..+\.(?P<host>[^.]+)\.\d+\.(?P<pid>\d+)\.tmp")


def temporary_path(final: Path) -> Path:
    """Path at which this thread writes the content of ``final`` before the rename.

    The file is hidden, lies in the same folder, and is named after the host, the process and the thread.
    """
    return final.with_name(f".{final.name}.{_host()}.{threading.get_native_id()}.{os.getpid()}.tmp")


def remove_stale_temporaries(final: Path, *, locked: bool = False) -> None:
    """Delete the temporary files that dead processes of this host left behind while they wrote ``final``.

    ``locked``: the caller holds a lock without which no process of this host writes ``final``. Whoever left a file is
    dead then, although its process id may still exist, because the kernel frees the locks of a dying process first.
    """
    for path in final.parent.glob(glob.escape(f".{final.name}.") + "*.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        if match and match["host"] == _host() and (locked or not _is_alive(int(match["pid"]))):
            logger.info("removing %s, left by process %s, which is gone", path, match["pid"])
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush ``folder`` to disk, so that renames inside it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_special(final: Path) -> None:
    """Raise ``OSError`` for a device, a FIFO or a socket: root could replace it, and writing may never end."""
    if final.exists() and not (final.is_file() or final.is_dir()):
        raise OSError(errno.ENXIO, "it is no regular file", str(final))


@contextmanager
def whole_file(final: Path) -> Iterator[Path]:
    """Yield a path to write to, and rename that file to ``final`` at the end of the block.

    So ``final`` holds its old content, none, or all of the new, even if the process is killed. If the block raises, the
    new content is deleted. Raises as ``refuse_special``.
    """
    refuse_special(final)
    temporary = temporary_path(final)
    try:
        yield temporary
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` as ``whole_file`` does. When this returns, it survives a power cut."""
    remove_stale_temporaries(path)
    with whole_file(path) as temporary, temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (created, never deleted). The kernel frees it when the holder dies.

    Raises ``DataError`` where the holder is a stopped process of this machine, which may never go on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        since: float | None = None  # when the holder was first seen stopped
        while not _took(file):
            if since is None:
                logger.info("waiting for another process that holds %s", path)
            file.seek(0)
            holder = file.read().split()
            if len(holder) != 2 or holder[0] != _host() or not is_stopped(int(holder[1])):
                since = math.inf
            elif since is None or since == math.inf:
                since = time.monotonic()
            elif time.monotonic() - since > STOPPED_SECONDS:
                raise DataError(
                    f"process {holder[1]} holds {path} and is stopped (as by Ctrl-Z)",
                    so="what it has begun would be waited for, perhaps for ever",
                    fix=f"let it go on (kill -CONT {holder[1]}) or end it",
                )
            time.sleep(_LOOK_SECONDS)
        file.truncate(0)
        file.write(f"{_host()} {os.getpid()}")
        file.flush()
        yield  # closing the file releases the lock


def _took(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped by a signal; False where the system does not say it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def _host() -> str:
    return socket.gethostname().split(".")[0]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists and belongs to somebody else
        return True
    return True
