"""Errors that no code has foreseen, as one message: what the system refused, or where the stack trace was kept."""

from __future__ import annotations

import errno
import os
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

from bytescale.common.errors import BytescaleError, DiskFullError

_REMEDIES = {
    errno.EACCES: "look at its owner and permissions, or name another place",
    errno.EPERM: "look at its owner and permissions, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.ENOTDIR: "a part of this path is a file: name another path",
    errno.EEXIST: "remove it, or name another path",
    errno.EISDIR: "this is a folder: name a file",
    errno.ENOENT: "look for a spelling mistake, or make the folder first",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ELOOP: "this is a chain of links that ends nowhere: name the place itself",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "close other programs: this machine has no room for more open files",
    errno.ENOMEM: "close other programs, or use fewer ranks",
}


class SystemRefusal(BytescaleError, OSError):
    """The operating system refused a file or a folder."""


class UnexpectedError(BytescaleError, RuntimeError):
    """Something that should not have happened, with the place of its stack trace."""


def foreseen(error: Exception, command: str) -> Exception:
    """Return the message for what the system refused. Other errors are returned as they are."""
    if isinstance(error, BytescaleError) or not isinstance(error, OSError):
        return error
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f"the disk that holds {error.filename}" if error.filename else "the disk of the run folder"
        return DiskFullError(
            f"no space is left on {where}",
            so="the run cannot go on; earlier checkpoints are complete",
            fix="free some space, or lower checkpoint.keep, then continue with `bytescale train --resume RUN_FOLDER`",
        )
    if error.filename is None:
        return error
    name = error.filename if error.filename2 is None else error.filename2  # where a file was to be renamed to
    return SystemRefusal(
        f"{os.fsdecode(name)}: {(error.strerror or str(error)).lower()}",
        so=f"`bytescale {command}` cannot go on; what was complete before is as it was",
        fix=_REMEDIES.get(error.errno or 0, "look at the disk, or at the server of the file system"),
    )


def unexpected(error: Exception) -> UnexpectedError:
    """Return one message for a bug of ours, whose stack trace is kept in a file."""
    place = keep_trace("".join(traceback.format_exception(error)))
    text = " ".join(str(error).split())[:500]
    return UnexpectedError(
        f"{type(error).__name__}: {text}" if text else type(error).__name__,
        so=f"nobody has foreseen this; the stack trace is in {place}",
        fix="report it with that file and the command",
    )


def keep_trace(trace: str) -> Path | str:
    """Write a stack trace to a new file that only this user can read. Returns its path, or why there is none."""
    with suppress(OSError):
        number, path = tempfile.mkstemp(prefix="bytescale-trace-", suffix=".txt")
        with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(trace)
        return Path(path)
    return "no file, as none can be written"
