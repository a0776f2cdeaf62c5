"""Ranks as forked processes: the whole trainer, process groups and all, without the seconds that torchrun needs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Any

# What trainers import late: here once, not in every forked rank.
import torch._dynamo  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

from tests.helpers.ports import reserve_port

DIED = (False, "died without an answer")


def run_forked(
    num_ranks: int, work: Callable[[int], Any], *, timeout_seconds: float = 300.0, kill_with_first: bool = False,
    lost: Collection[int] = (),
) -> list[Any]:  # fmt: skip
    """Run ``work(rank)`` in ``num_ranks`` processes with torchrun's environment; its results in rank order.

    ``kill_with_first``: when the first rank dies without an answer, all others are killed at once, as torchrun does.
    Without it they are left to notice by themselves, which takes as long as their groups' timeout if they wait in a
    collective for ranks that had never connected.
    ``lost``: ranks that have to die without an answer, while the others go on.

    Raises ``AssertionError`` with the stack trace of every rank that failed, or that still ran at the end.
    """
    context = multiprocessing.get_context("fork")
    # A failed run leaves its gloo groups in the cycle of its exception. Their end waits for their threads, which a fork
    # does not copy: so they end here, before it, and nothing else is collected in a rank, which freezes it.
    gc.collect()
    reservation = reserve_port()
    port = reservation.getsockname()[1]
    processes, pipes = [], []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_one_rank, args=(rank, num_ranks, port, work, sender), daemon=True)
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    deadline = time.monotonic() + timeout_seconds
    first = _receive(pipes[0], deadline)
    if kill_with_first and first == DIED:
        for process in processes:
            process.kill()
    outcomes = [first, *(_receive(pipe, deadline) for pipe in pipes[1:])]
    for process in processes:
        process.join(5.0)
        if process.is_alive():
            process.kill()
    reservation.close()
    failed = [f"rank {rank}: {text}" for rank, (succeeded, text) in enumerate(outcomes)
              if ((succeeded, text) != DIED if rank in lost else not succeeded)]  # fmt: skip
    assert not failed, "\n".join(failed)
    return [result for _, result in outcomes]


def _one_rank(rank: int, num_ranks: int, port: int, work: Callable[[int], Any], sender: Connection) -> None:
    gc.freeze()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        sender.send((True, work(rank)))
    except BaseException:
        sender.send((False, traceback.format_exc()))


def _receive(pipe: Connection, deadline: float) -> tuple[bool, Any]:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        return False, "no answer in time"
    try:
        return pipe.recv()
    except EOFError:
        return DIED
