"""Tries again what a file system refused, with growing pauses, and in the end gives up with the last error."""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from bytescale.common.errors import DataError
from bytescale.storage.filesystems import guarded

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

FIRST_PAUSE_SECONDS = 0.5
"""The pause after the first failure. It doubles after every failure."""
RETRIES = 4
"""They wait 7.5 s in all: longer than a server takes to restart, and short where nobody will mend it."""
ANSWER_SECONDS = 45.0
"""A request to a store is given up after so many seconds: two tries of its client, of 20 s each."""
_HOPELESS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class UnreadableError(DataError):
    """A file could not be read. Raised ``from`` the ``OSError``."""


def unreadable(error: OSError, path: object) -> UnreadableError:
    """Return the error for the file that ``error`` names, or for ``path`` if ``error`` names none."""
    return UnreadableError(
        f"{error.filename or path} cannot be read ({error.strerror or error})",
        fix="mend it, check the credentials, or take it out of data.sources",
    )


def with_retries(action: Callable[[], Result], *, seconds: float = math.inf) -> Result:
    """Return ``action()``. After an ``OSError`` or ``UnreadableError`` it is tried again, up to ``RETRIES`` times.

    A file that is missing or that this user may not read is not tried again. No new try begins when ``seconds`` have
    passed in all.
    """
    began = time.monotonic()
    for attempt in range(RETRIES + 1):
        try:
            return action()
        except (OSError, UnreadableError) as error:
            cause = error.__cause__ if isinstance(error, UnreadableError) else error
            if isinstance(cause, _HOPELESS) or attempt == RETRIES or time.monotonic() - began >= seconds:
                raise
            pause = FIRST_PAUSE_SECONDS * 2**attempt
            what = str(error).split(" To fix:")[0]  # the user need not fix anything yet
            logger.warning("%s Trying again in %.1f s (%d of %d).", what, pause, attempt + 1, RETRIES)
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def tried(url: str, action: Callable[[], Result], *, seconds: float = ANSWER_SECONDS) -> Result:
    """Return ``action()``, a request to a store, tried again some times. Its errors are ``OSError``.

    Each try is given up after ``seconds``, because not every file system has time limits of its own.
    """
    return with_retries(lambda: guarded(url, lambda: _within(seconds, action)), seconds=seconds)


def _within(seconds: float, action: Callable[[], Result]) -> Result:
    """Return ``action()``. Raises ``TimeoutError`` after ``seconds``; the stuck thread ends with the process."""
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
