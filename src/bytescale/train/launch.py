"""Starts the ranks of one node with torchrun's own agent, and says in one message which rank ended a run.

When a rank dies, the agent sees it within 0.1 s and stops the others; a rank that hangs is noticed by its peers after
``parallel.timeout_seconds``.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence

import torch
from rich.console import Console
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bytescale.common.errors import RankFailure, RanksRefused, problem
from bytescale.config import Config
from bytescale.train.ranks import LAUNCHER_PID


def launch_ranks(num_ranks: int, arguments: Sequence[str], *, run_dir: str, stop_seconds: float) -> None:
    """Run ``python -m bytescale <arguments>`` as ``num_ranks`` ranks on this machine and wait for them.

    Args:
        num_ranks: processes to start.
        arguments: of the command line.
        run_dir: for messages.
        stop_seconds: that ranks get to end by themselves, once one of them has failed or a signal came.

    Raises:
        RanksRefused: the ranks found the input bad.
        RankFailure: a rank failed; names it, why, and how to go on.
        SystemExit: the user or the system asked to stop (SIGINT, SIGTERM); the ranks are gone.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failure is told once, below
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    os.environ[LAUNCHER_PID] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex[:8],
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=math.ceil(stop_seconds),
    )
    try:
        _launch(config, arguments, run_dir)
    finally:
        if sys.stdout.isatty():
            Console().show_cursor()  # a rank that was killed while it drew its bar has left it hidden


def _launch(config: LaunchConfig, arguments: Sequence[str], run_dir: str) -> None:
    try:
        elastic_launch(config, entrypoint=sys.executable)("-u", "-m", "bytescale", *arguments)
    except ChildFailedError as error:
        raise rank_failure(error.failures, run_dir) from None
    except SignalException as stop:
        print(f"stopped by {signal.Signals(stop.sigval).name}; continue with: bytescale train --resume {run_dir}")
        raise SystemExit(128 + stop.sigval) from None


def ranks_there(config: Config) -> int:
    """How many of ``parallel.ranks`` this machine has a place for: one per GPU that answers, on CPUs all of them.

    A process that died leaves its cores behind; a GPU may be lost. Counted by a process of its own, since CUDA counts
    once per process.
    """
    if not torch.cuda.is_available() or config.trainer.device == "cpu":
        return config.parallel.ranks
    count = "import torch; print(torch.cuda.device_count())"
    counted = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True)
    return max(1, min(config.parallel.ranks, int(counted.stdout)))


def rank_failure(failures: dict[int, ProcessFailure], run_dir: str) -> RankFailure:
    """The error of the rank that failed first by itself, out of all that ended badly."""
    rank, failure = min(failures.items(), key=lambda item: (_rank_of_blame(item[1]), item[1].timestamp, item[0]))
    if _error_type(failure) in _USER_ERRORS:  # the same on every rank: it is the message, not the rank, that matters
        return RanksRefused(_message(failure))
    return RankFailure(
        problem(
            f"rank {rank} {_how(failure)}",
            so="the other ranks were stopped; checkpoints written before are whole",
            fix=f"mend the cause, then continue with `bytescale train --resume {run_dir}`",
        )
    )


_USER_ERRORS = ("ConfigError", "DataError", "PlanError", "CheckpointError", "NonFiniteError", "DiskFullError")


def _rank_of_blame(failure: ProcessFailure) -> int:
    """0: killed from outside; 1: an error of its own; 2: lost a peer; 3: stopped by the agent."""
    if failure.exitcode == -signal.SIGTERM:
        return 3
    if failure.exitcode < 0:
        return 0
    return 2 if _error_type(failure) == "RankFailure" else 1


def _how(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = ", perhaps out of memory" if name == "SIGKILL" else ""
        return f"(pid {failure.pid}) was killed by {name}{hint}"
    return f"(pid {failure.pid}) failed with exit code {failure.exitcode}: {_message(failure)}"


def _message(failure: ProcessFailure) -> str:
    """What the rank's exception said, without its type where the text stands for itself."""
    _, _, text = _record(failure).partition(": ")
    return text if _error_type(failure) in (*_USER_ERRORS, "RankFailure", "LoaderFailure") else _record(failure)


def _error_type(failure: ProcessFailure) -> str:
    """``"DataError"`` from torchrun's record ``"DataError: the corpus is empty"``; empty if there is none."""
    head, colon, _ = _record(failure).partition(": ")
    return head if colon and head.isidentifier() else ""


def _record(failure: ProcessFailure) -> str:
    """torchrun's note of the exception, a string or a dictionary with the stack trace beside it."""
    message: object = failure.message
    return str(message["message"]) if isinstance(message, dict) else str(message)
