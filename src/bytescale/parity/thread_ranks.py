"""Ranks as threads of this process: real gloo messages over loopback, ready in milliseconds.

Each thread owns a gloo backend over one in-memory store. Autograd runs a thread's backward on that thread, so the
runtime works exactly as in separate processes, collectives and point-to-point alike.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from bytescale.runtime.group import gloo_group

Result = TypeVar("Result")

_SECONDS_AFTER_AN_ERROR = 3.0


def run_ranks(
    num_ranks: int, work: Callable[[dist.ProcessGroup], Result], *, timeout_seconds: float = 300.0
) -> list[Result]:
    """Run ``work`` once per rank, at the same time; its results in rank order.

    Raises ``AssertionError`` with the stack traces of all ranks that failed, or the numbers of those that still run.
    """
    store = dist.HashStore()
    _make_operators()
    # After a fork, the first thread that computes makes PyTorch's pool again, and a second one may see none meanwhile.
    torch.set_num_threads(torch.get_num_threads())
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def one_rank(rank: int) -> None:
        try:
            results[rank] = work(gloo_group(store, rank, num_ranks, timeout_seconds))
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=one_rank, args=(rank,), daemon=True) for rank in range(num_ranks)]
    # A collection runs Python code, of callbacks and finalizers, also while PyTorch holds a lock of its own (that of
    # random numbers) for which another thread waits with the interpreter's: neither would go on.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_seconds
        for thread in threads:
            while thread.is_alive() and time.monotonic() < deadline:
                thread.join(0.1)
                if errors:  # the others may wait for this rank; what they say within seconds is reported too
                    deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_AN_ERROR)
        if errors:
            texts = (f"rank {rank}: {''.join(traceback.format_exception(errors[rank]))}" for rank in sorted(errors))
            failure = AssertionError("\n".join(texts))
            failure.__cause__ = next(iter(errors.values()))
            _forget_locals(list(errors.values()))
            raise failure
        hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        assert not hung, f"ranks {hung} still run after {timeout_seconds} s"
        return [results[rank] for rank in range(num_ranks)]
    finally:
        gc.collect()  # groups that stand in reference cycles, before their store goes and before anybody forks
        if was_enabled:
            gc.enable()


@functools.cache
def _make_operators() -> None:
    """Make the Python object of every operator that PyTorch knows, before threads do so.

    They are made at their first use under a ``TorchDispatchMode``. When two threads do it at the same time, the second
    object replaces the first, which is freed, while PyTorch may go on to call it: a segmentation fault (torch 2.13).
    """
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        operator, _, overload = operator.partition(".")
        getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")


def _forget_locals(errors: Sequence[BaseException]) -> None:
    """Drop what the functions that failed had in hand. Their groups, and the threads of these, would stay otherwise."""
    waiting: list[BaseException | None] = list(errors)
    done: set[int] = set()  # causes and contexts may form a circle
    while waiting:
        error = waiting.pop()
        if error is not None and id(error) not in done:
            done.add(id(error))
            traceback.clear_frames(error.__traceback__)
            waiting += [error.__cause__, error.__context__]
