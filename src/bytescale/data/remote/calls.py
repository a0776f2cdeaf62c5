"""Calls to actors, with a time limit and with errors that a user can act on."""

from __future__ import annotations

from typing import Any

import ray
import ray.exceptions

from bytescale.common.errors import BytescaleError, LoaderFailure


def wait_for(reference: Any, who: str, timeout_seconds: float | None) -> Any:
    """Wait for a call to an actor, and return its result.

    Args:
        reference: Ray's reference to the result of the call, or a list of references.
        who: name of the actor for messages, such as ``"data server 1"``.
        timeout_seconds: longest wait. None waits as long as the actor lives, because tokenising may take long.

    Raises the ``BytescaleError`` of the call itself, as if it had been raised here; ``LoaderFailure`` if no answer came
    in time, the actor is gone for good, or Ray's memory or disk is full.
    """
    try:
        return ray.get(reference, timeout=timeout_seconds)
    except Exception as error:
        raise translated(error, who, timeout_seconds) from error


def translated(error: Exception, who: str, timeout_seconds: float | None = None) -> Exception:
    """Return the error of this project for an ``error`` of Ray. Errors that are bugs of ours come back unchanged."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, BytescaleError):
            return cause
        return translated(cause, who) if isinstance(cause, ray.exceptions.RayError) else error
    if isinstance(error, ray.exceptions.GetTimeoutError):
        assert timeout_seconds is not None, "only a call with a limit can pass it"
        return LoaderFailure(
            f"{who} did not answer within {timeout_seconds:.0f} s",
            so="the step has no data; checkpoints written before are whole",
            fix="look at the load of its node, then resume",
        )
    first = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, ray.exceptions.ObjectStoreFullError | ray.exceptions.OutOfDiskError):
        return LoaderFailure(
            f"Ray has no room left for what {who} sent ({first})",
            so="the step has no data; checkpoints written before are whole",
            fix="give Ray more (`ray start --object-store-memory`), or free its disk",
        )
    if isinstance(error, ray.exceptions.RayError | ConnectionError):
        return LoaderFailure(
            f"{who} is gone ({type(error).__name__}: {first})",
            so="the step has no data; checkpoints written before are whole",
            fix="find out why the first rank or Ray itself ended, then resume",
        )
    return error
