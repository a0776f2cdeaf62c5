"""Temporary folders that no other user can enter. Those of an owner that was killed are removed at the next start."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def private_folder(prefix: str, parent: str | None = None) -> Iterator[Path]:
    """Make a folder of mode 0700 for the time of the block, in ``parent`` or the system's temporary folder.

    Its owner holds a lock inside of it, which the kernel frees when the owner dies: process ids would not do between
    containers. Unlocked folders of this user with the same ``prefix`` are removed first.
    """
    parent = parent or tempfile.gettempdir()
    for folder in Path(parent).glob(f"{prefix}*"):
        with suppress(OSError), ExitStack() as stack:  # in use, gone, or of the version without a lock
            _take(folder, stack)
            shutil.rmtree(folder, ignore_errors=True)
    with ExitStack() as stack:
        folder = _locked_folder(prefix, parent, stack)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _take(folder: Path, stack: ExitStack) -> None:
    """Lock an existing folder. Raises ``OSError`` unless it is this user's alone and nobody holds its lock."""
    found = os.lstat(folder)  # another user may give a FIFO any name: nothing is opened before the owner is known
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a private folder of this user")
    fcntl.flock(_opened(folder / "lock", os.O_RDWR, stack), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _locked_folder(prefix: str, parent: str, stack: ExitStack) -> Path:
    """A new folder whose lock this process holds until ``stack`` closes."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # of mode 0700
        with suppress(FileNotFoundError):  # another start saw the folder before it was locked, and removed it
            file = _opened(folder / "lock", os.O_RDWR | os.O_CREAT, stack)
            with suppress(OSError):  # a file system without locks, where what a killed owner leaves stays
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / "lock")):
                return folder


def _opened(path: Path, flags: int, stack: ExitStack) -> IO[bytes]:
    return stack.enter_context(os.fdopen(os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600), "r+b"))
