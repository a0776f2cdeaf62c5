"""Starts the ranks of this machine as processes, and reports in one message which rank ended a run.

The environment is that of torchrun. Its agent is not used: the agent has a key-value store that listens on all
interfaces, and unpickles what anyone puts there. When a rank dies, the launcher sees it within 0.1 s and stops the
others. A rank that hangs is noticed by its peers after ``parallel.timeout_seconds``.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from bytescale.common.atomic import is_stopped
from bytescale.common.errors import RankFailure, RanksRefused, keep_trace
from bytescale.config.schema import Config
from bytescale.train.changing import JOINS
from bytescale.train.launch.forked import Main, can_be_copied
from bytescale.train.launch.processes import RankProcesses
from bytescale.train.parts.budget import check_room
from bytescale.train.ranks import LAUNCHER_PID, STORE_FILE, TIMEOUT_SECONDS

_LOOK_SECONDS = 0.1
_LAST_SECONDS = 5.0
_SETTLE_SECONDS = 2.0
"""How long after a rank others may end by the same cause, so that it is not replaced."""


def launch_ranks(
    num_ranks: int,
    arguments: Sequence[str],
    *,
    main: Main,
    modules: Sequence[str],
    again: Callable[[], str],
    stop_seconds: float = 30.0,
    silent_seconds: float | None = None,
    replacements: int | None = None,
) -> None:
    """Run ``python -m bytescale <arguments>`` as ``num_ranks`` ranks on this machine and wait for them.

    ``main, modules``: for ranks that are copies of this process (``launch.forked``), the program, and what it imports.
    Ranks have
    ``stop_seconds`` to end by themselves after a signal arrived. ``again``: what to do to go on, for messages, such as
    "continue with `...`"; it is asked when something has stopped. ``silent_seconds``: how long a rank may be stopped;
    None: as long as a message may take by default. ``replacements``: where ranks go on without those that die
    (``parallel.elastic``), how many new ones are started in their place; None: all end with the first that fails.

    Raises:
        ConfigError: this machine has no room for so many processes.
        RanksRefused: the ranks rejected the input.
        RankFailure: a rank failed; the message names the rank, the cause, and how to continue.
        SystemExit: the user or the system asked to stop (SIGINT, SIGTERM); the ranks have ended.
    """
    check_room(num_ranks)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failure is reported once, below
    are_copies = can_be_copied()
    for module in modules if are_copies else ():
        importlib.import_module(module)
    try:
        with TemporaryDirectory(prefix="bytescale-ranks-", ignore_cleanup_errors=True) as folder:
            limits = stop_seconds, silent_seconds or TIMEOUT_SECONDS["cpu"]
            environment = {
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "GROUP_RANK": "0",
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks))),
                LAUNCHER_PID: str(os.getpid()),
                STORE_FILE: str(Path(folder) / "store"),
            }
            ranks = RankProcesses(Path(folder), arguments, main if are_copies else None, environment)
            failures = _run(ranks, num_ranks, limits, again, replacements)
    finally:
        if sys.stdout.isatty():
            Console().show_cursor()  # a rank that was killed while drawing its bar leaves it hidden
    if failures:
        raise rank_failure(failures, again)


def _run(
    ranks: RankProcesses,
    num_ranks: int,
    limits: tuple[float, float],
    again: Callable[[], str],
    replacements: int | None,
) -> dict[int, ProcessFailure]:
    """Start the ranks and wait until all have ended. Returns the failures by rank. Raises as ``launch_ranks``."""
    stop_seconds, silent_seconds = limits
    try:
        ranks.start(range(num_ranks))
        if replacements is None:
            failures = _wait(ranks, stop_seconds, silent_seconds)
        else:
            failures = _outlive(ranks, num_ranks, silent_seconds, replacements)
        for each in (signal.SIGTERM, signal.SIGINT):  # a rank was asked, and all have stopped early (``StopRequest``)
            if failures and all(own.exitcode == 128 + each for own in failures.values()):
                raise _stopped(each.name, again)
        return failures
    except SignalException as stop:
        name = signal.Signals(stop.sigval).name
        print(
            f"\n{name}: waiting up to {stop_seconds:.0f} s for the ranks to finish and save; a second signal ends them "
            "at once",
            file=sys.stderr,
            flush=True,
        )
        try:
            ranks.close(signal.SIGTERM, math.ceil(stop_seconds))
        except SignalException:  # the second one
            ranks.close(signal.SIGKILL, math.ceil(stop_seconds))
        if ranks.by_rank and not any(process.poll() for process in ranks.by_rank.values()):
            return {}  # what was to be done is done
        raise _stopped(name, again) from None


def _stopped(name: str, again: Callable[[], str]) -> SystemExit:
    print(f"stopped by {name}; {again()}")
    return SystemExit(128 + signal.Signals[name])


def _wait(ranks: RankProcesses, stop_seconds: float, silent_seconds: float) -> dict[int, ProcessFailure]:
    """Wait until all ranks have ended, or one has failed; then end the others. Returns the failures by rank.

    Ranks that are ended here have not failed. A stopped rank (SIGSTOP) hears no signal but the one that kills.

    Raises ``RankFailure`` for a rank that has been stopped for ``silent_seconds``.
    """
    processes = ranks.by_rank
    while any(process.poll() is None for process in processes.values()):
        if any(process.poll() for process in processes.values()) or ranks.silent(silent_seconds):
            break
        time.sleep(_LOOK_SECONDS)
    alive = [rank for rank, process in processes.items() if process.poll() is None]
    stopped = [rank for rank in alive if is_stopped(processes[rank].pid)]
    for rank in stopped:
        processes[rank].kill()
    # Without a stopped rank the others can do nothing, and gloo tries for a while to reach it.
    ranks.close(signal.SIGTERM, math.ceil(min(stop_seconds, _LAST_SECONDS) if stopped else stop_seconds))
    ours = (-signal.SIGTERM, -signal.SIGKILL)
    failures = {rank: own for rank, own in ranks.failures().items() if not (rank in alive and own.exitcode in ours)}
    if stopped and all(_rank_of_blame(own) == 2 for own in failures.values()):
        raise RankFailure(
            f"rank {stopped[0]} (pid {processes[stopped[0]].pid}) was stopped (SIGSTOP), and did not answer the others",
            so="they gave up after parallel.timeout_seconds; what was written before is whole",
            fix="do not stop single ranks, or raise parallel.timeout_seconds",
        )
    return failures


def _outlive(
    ranks: RankProcesses, num_ranks: int, silent_seconds: float, replacements: int
) -> dict[int, ProcessFailure]:
    """Wait until all ranks have ended, of which some may die while the others go on. Returns the failures of the last.

    A rank that died is replaced, and one that has been stopped for ``silent_seconds`` is killed.
    """
    died: dict[int, float] = {}  # when it was seen
    while any(process.poll() is None for process in ranks.by_rank.values()):
        for rank in ranks.silent(silent_seconds):
            ranks.by_rank[rank].kill()
        for rank, process in list(ranks.by_rank.items()):
            if process.poll() and process.returncode not in (128 + signal.SIGTERM, 128 + signal.SIGINT):
                died.setdefault(rank, time.monotonic())
        for rank, seen in list(died.items()):
            if time.monotonic() - seen > _SETTLE_SECONDS:  # not all of them end
                del died[rank]
                process = ranks.by_rank.pop(rank)
                how = (
                    f"exit code {process.returncode}"
                    if process.returncode > 0
                    else signal.Signals(-process.returncode).name
                )
                print(f"rank {rank} (pid {process.pid}) has ended ({how}); the others go on", flush=True)
                if replacements:
                    replacements -= 1
                    ranks.start([rank], **{JOINS: str(num_ranks)})
        time.sleep(_LOOK_SECONDS)
    if any(process.returncode == 0 for process in ranks.by_rank.values()):
        return {}
    return {rank: own for rank, own in ranks.failures().items() if rank in ranks.by_rank}


def ranks_there(config: Config) -> int:
    """How many of ``parallel.ranks`` this machine can run: one per GPU that responds, or all of them on CPUs.

    After a failure a GPU may be lost, whereas cores are free again. GPUs are counted in a process of their own, because
    CUDA counts them only once per process.
    """
    if not torch.cuda.is_available() or config.trainer.device == "cpu":
        return config.parallel.ranks
    count = "import torch; print(torch.cuda.device_count())"
    counted = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True)
    return max(1, min(config.parallel.ranks, int(counted.stdout)))


def rank_failure(failures: dict[int, ProcessFailure], again: Callable[[], str]) -> RankFailure:
    """The error of the rank that failed first by its own cause, among all ranks that failed."""
    rank, failure = min(failures.items(), key=lambda item: (_rank_of_blame(item[1]), item[1].timestamp, item[0]))
    kind, text, trace = _error_of(failure)
    if kind in _USER_ERRORS:  # the same on every rank: it is the message, not the rank, that matters
        return RanksRefused(text)
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        how = f"was killed by {name}" + (", perhaps out of memory" if name == "SIGKILL" else "")
    else:
        where = f" (its stack trace is in {keep_trace(trace)})" if trace else ""
        how = f"failed with exit code {failure.exitcode}: {text}{where}"
    return RankFailure(
        f"rank {rank} (pid {failure.pid}) {how}",
        so="the other ranks were stopped; what was written before is whole",
        fix=f"mend the cause, then {again()}",
    )


_USER_ERRORS = ("ConfigError", "DataError", "PlanError", "CheckpointError", "NonFiniteError", "DiskFullError")
_CLEAR_ERRORS = (*_USER_ERRORS, "RankFailure", "RanksLost", "LoaderFailure", "SystemRefusal")


def _rank_of_blame(failure: ProcessFailure) -> int:
    """0: killed from outside; 1: an error of its own; 2: lost a peer; 3: asked to end."""
    if failure.exitcode == -signal.SIGTERM:
        return 3
    if failure.exitcode < 0:
        return 0
    return 2 if _error_of(failure)[0] in ("RankFailure", "RanksLost") else 1


def _error_of(failure: ProcessFailure) -> tuple[str, str, str]:
    """The type of a rank's exception, its text for people, and its stack trace unless the text is clear by itself."""
    message: Any = failure.message  # "DataError: the corpus is empty", or a dictionary with the trace beside it
    about = message if isinstance(message, dict) else {"message": message}
    record = str(about["message"])
    kind, colon, text = record.partition(": ")
    kind = kind if colon and kind.isidentifier() else ""
    if kind in _CLEAR_ERRORS:
        return kind, text, ""
    return kind, record, about.get("extraInfo", {}).get("py_callstack") or ""
