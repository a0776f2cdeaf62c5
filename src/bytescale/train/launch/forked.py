"""Ranks on CPUs as copies of the launcher, which has imported everything: a rank starts at once, not after 6 seconds.

A copy of a process has one thread, so the launcher may have no others: neither Python's own, nor those with which
PyTorch computes. Nor may it have used a GPU. Elsewhere every rank is a new process (``launch.torchrun``).
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

_LOOK_SECONDS = 0.02
_ENDING_SECONDS = 2.0
Main = Callable[[Sequence[str]], int]
"""A program: takes the words of a command, and returns its exit code."""


def prepare_for_copies() -> None:
    """Let PyTorch compute on this thread alone. To be called before it computes anything."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)


def can_be_copied() -> bool:
    """Whether ranks may be copies of this process. Threads that are about to end, as those of progress bars, may."""
    until = time.monotonic() + _ENDING_SECONDS
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))
    one_thread = threading.active_count() == 1 and torch.get_num_threads() == 1
    return sys.platform == "linux" and one_thread and not torch.cuda.is_available()


class Copies(SubprocessContext):
    """torch's context of processes, which here are copies of this one that call ``entrypoint``
    with what ``args`` has for them."""

    def _start(self) -> None:
        self.subprocess_handlers = {
            rank: _Handler(self.entrypoint, self.args[rank][0], self.envs[rank])  # type: ignore[misc, arg-type]
            for rank in range(self.nprocs)
        }


class _Handler:
    """Of one rank: the part of torch's ``SubprocessHandler`` that its context uses."""

    def __init__(self, main: Main, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.proc = _Process(main, arguments, environment)

    def close(self, death_sig: signal.Signals) -> None:
        os.killpg(self.proc.pid, death_sig)


class _Process:
    """A copy of this process: the part of ``subprocess.Popen`` that launchers use."""

    def __init__(self, main: Main, arguments: Sequence[str], environment: dict[str, str]) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise both processes would write what waits there
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become_rank(main, arguments, environment)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Raises ``subprocess.TimeoutExpired``."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(_LOOK_SECONDS)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _become_rank(main: Main, arguments: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """Run a command as a new process would; nothing of what the launcher has begun is ended here."""
    code: Any = 1
    try:
        os.setsid()
        for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(each, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        os.environ.update(environment)
        Path("/proc/self/comm").write_text(f"bytescale-{environment['RANK']}")  # for top and ps
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
            atexit._run_exitfuncs()
            sys.stdout.flush()
        finally:
            os._exit(code if isinstance(code, int) else int(code is not None))
