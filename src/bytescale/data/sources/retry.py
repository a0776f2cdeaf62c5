"""Tries a failing read again, with growing pauses, and in the end gives up with an error that names the file."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from bytescale.common.errors import DataError, problem

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

FIRST_PAUSE_SECONDS = 0.5
"""The pause after the first failure. It doubles after every failure: 3 retries wait 0.5, 1 and 2 seconds."""
_HOPELESS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class UnreadableError(DataError):
    """A file could not be read. Raised ``from`` the ``OSError``."""


def unreadable(error: OSError, path: object) -> UnreadableError:
    """Return the error for the file that ``error`` names, or for ``path`` if ``error`` names none."""
    return UnreadableError(
        problem(
            f"{error.filename or path} cannot be read ({error.strerror or error})",
            fix="mend it, check the credentials, or take it out of data.sources",
        )
    )


def with_retries(action: Callable[[], Result], retries: int, sleep: Callable[[float], None] = time.sleep) -> Result:
    """Return ``action()``. After an ``UnreadableError`` it is tried again, up to ``retries`` times.

    A file that is missing or that this user may not read is not tried again.
    """
    for attempt in range(retries + 1):
        try:
            return action()
        except UnreadableError as error:
            if isinstance(error.__cause__, _HOPELESS) or attempt == retries:
                raise
            pause = FIRST_PAUSE_SECONDS * 2**attempt
            cause = str(error).split(" To fix:")[0]  # the user need not fix anything yet
            logger.warning("%s Trying again in %.1f s (%d of %d).", cause, pause, attempt + 1, retries)
            sleep(pause)
    raise AssertionError("the last attempt returns or raises")
