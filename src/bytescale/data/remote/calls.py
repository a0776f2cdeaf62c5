"""Calls to actors: bounded in time, with errors that a user can act on."""

from __future__ import annotations

from typing import Any

import ray
import ray.exceptions

from bytescale.common.errors import BytescaleError, LoaderFailure, problem


def wait_for(reference: Any, who: str, timeout_seconds: float | None) -> Any:
    """What a call returned.

    Args:
        reference: of the call, or a list of them.
        who: was called, for messages: ``"the planner"``.
        timeout_seconds: None waits as long as ``who`` lives (tokenising takes its time).

    Raises:
        BytescaleError: what the call itself raised, as if it had been raised here.
        LoaderFailure: no answer in time, the actor is gone for good, or memory or disk of Ray are full.
    """
    try:
        return ray.get(reference, timeout=timeout_seconds)
    except Exception as error:
        raise translated(error, who, timeout_seconds) from error


def translated(error: Exception, who: str, timeout_seconds: float | None = None) -> Exception:
    """Ray's ``error`` in our words; errors that are nobody's fault but ours come back as they are."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, BytescaleError):
            return cause
        return translated(cause, who) if isinstance(cause, ray.exceptions.RayError) else error
    if isinstance(error, ray.exceptions.GetTimeoutError):
        assert timeout_seconds is not None, "only a call with a limit can pass it"
        return no_answer(who, timeout_seconds)
    if isinstance(error, ray.exceptions.ObjectStoreFullError | ray.exceptions.OutOfDiskError):
        return LoaderFailure(
            problem(
                f"Ray has no room left for what {who} sent ({_first_line(error)})",
                so="the step has no data; checkpoints written before are whole",
                fix="give Ray more (`ray start --object-store-memory`), free its disk, or lower data.prefetch_steps",
            )
        )
    if isinstance(error, ray.exceptions.RayError | ConnectionError):
        return LoaderFailure(
            problem(
                f"{who} is gone ({type(error).__name__}: {_first_line(error)})",
                so="the step has no data; checkpoints written before are whole",
                fix="look for the end of the first rank or of Ray itself, then resume",
            )
        )
    return error


def no_answer(who: str, seconds: float) -> LoaderFailure:
    """``who`` was given up."""
    return LoaderFailure(
        problem(
            f"{who} did not answer within {seconds:.0f} s",
            so="the step has no data; checkpoints written before are whole",
            fix="look at the load of its node, or raise data.answer_seconds, then resume",
        )
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""
