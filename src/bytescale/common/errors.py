"""The errors that a user can meet. Each message gives the cause, the value, the consequence and the remedy.

Errors that no code has foreseen become one message, too: what the system refused, or where the stack trace was kept.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

_REMEDIES = {
    errno.EACCES: "look at its owner and permissions, or name another place",
    errno.EPERM: "look at its owner and permissions, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.ENOTDIR: "a part of this path is a file: name another path",
    errno.EEXIST: "remove it, or name another path",
    errno.EFBIG: "name the file that is meant: no such file is as large",
    errno.ENXIO: "name a regular file in the place of this device, FIFO or socket",
    errno.EISDIR: "this is a folder: name a file",
    errno.ENOENT: "look for a spelling mistake, or make the folder first",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ELOOP: "this is a chain of links that ends nowhere: name the place itself",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "close other programs: this machine has no room for more open files",
    errno.ENOMEM: "close other programs, or use fewer ranks",
}
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class BytescaleError(Exception):
    """Base of all errors that the user or the machine causes. They are printed without a stack trace.

    ``BytescaleError(what, so=..., fix=...)`` says what is wrong, with the value; the consequence; and what the user has
    to do. ``what`` alone is the message as it is.
    """

    def __init__(self, what: str, *, so: str = "", fix: str = "") -> None:
        parts = [what, so, f"To fix: {fix}" if fix else ""]
        super().__init__(visible(" ".join(_sentence(part) for part in parts if part)) if so or fix else what)


class ConfigError(BytescaleError, ValueError):
    """A setting is wrong, or two settings contradict each other."""


class DataError(BytescaleError, ValueError):
    """A corpus, an index or a tokenizer cannot be read or does not fit the model."""


class PlanError(BytescaleError, ValueError):
    """A plan cannot be made for this batch on this cluster, or breaks one of the rules of ``plan.verify``."""


class CheckpointError(BytescaleError, RuntimeError):
    """A checkpoint is missing, incomplete or belongs to another model."""


class DiskFullError(BytescaleError, RuntimeError):
    """No space is left where a run writes."""


class LoaderFailure(BytescaleError, RuntimeError):
    """A server or the planner of the remote loader is gone, silent or out of memory. Starting again may help."""


class RankFailure(BytescaleError, RuntimeError):
    """A training rank died, or ranks no longer agree on what to run."""


class RanksLost(RankFailure):
    """A rank died or does not answer. The others may go on without it (``HDP.recover``, ``parallel.elastic``)."""


class RanksRefused(RankFailure):
    """Every rank refused its input. The user has to change something: starting again would not help."""


class NonFiniteError(BytescaleError, ArithmeticError):
    """The loss or the gradients are not numbers. The update was not made."""


class SystemRefusal(BytescaleError, OSError):
    """The operating system refused a file or a folder."""


class UnexpectedError(BytescaleError, RuntimeError):
    """Something that should not have happened, with the place of its stack trace."""


def foreseen(error: BaseException, command: str) -> BaseException:
    """Return the message for what the system refused. Other errors are returned as they are."""
    if isinstance(error, UnicodeEncodeError):  # the bytes of a name or an argument, which Python keeps as surrogates
        return ConfigError(f"{error.object[max(0, error.start - 40) : error.end + 20]!r} is not UTF-8", fix="rename it")
    if isinstance(error, ValueError) and "TORCH_LOGS" in os.environ and "TORCH_LOGS" in str(error):  # at its import
        return ConfigError(f"torch knows no such TORCH_LOGS as {os.environ['TORCH_LOGS']!r}", fix="unset it")
    if isinstance(error, MemoryError):
        return SystemRefusal(f"no memory is left ({error})", so=f"`bytescale {command}` cannot go on",
                             fix="use smaller numbers or files, or a machine with more memory")  # fmt: skip
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


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust has panicked. Python sees no Exception then, so most handlers miss it."""
    return type(error).__module__ == "pyo3_runtime"


def unexpected(error: BaseException) -> UnexpectedError:
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


def visible(text: str) -> str:
    r"""Return ``text`` with control characters spelled out, as ``\x1b``; newlines and tabs stay.

    A terminal obeys escape sequences: a file's name or a line of a corpus could clear the screen or hide a message.
    Characters that reverse the direction of writing are spelled out, too.
    """
    return _CONTROLS.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def typed_path(text: str | Path) -> Path:
    """The path that a person typed, with ``~`` for the home folder. Raises ``ConfigError`` if there can be none."""
    try:
        if "\0" not in str(text):
            return Path(text).expanduser()
        why = "holds a NUL character"
    except RuntimeError:
        why = f"begins with {str(text).partition('/')[0]}, the home folder of a user that this machine does not know"
    raise ConfigError(f"the path {str(text)!r} {why}", fix="write the whole path without it")


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:] if text[1:2].isspace() or text.split(" ")[0].isalpha() else text
    return text if text.endswith((".", "?", "!")) else text + "."
