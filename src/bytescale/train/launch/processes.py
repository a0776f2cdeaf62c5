"""The processes of this machine's ranks: started together, or one in the place of another."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from bytescale.common.atomic import is_stopped
from bytescale.train.launch.forked import Copies, Main, can_be_copied

_LOOK_SECONDS = 0.1


class RankProcesses:
    """Contexts of torch, each with some ranks.

    Attributes:
        by_rank: the processes, as ``subprocess.Popen``. Whoever takes one out has seen its end.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], main: Main | None, environment: dict[str, str]) -> None:
        """``main``: for ranks that are copies of this process (``launch.forked``); None: they are new ones."""
        self._folder, self._arguments, self._main, self._environment = folder, arguments, main, environment
        self._contexts: list[tuple[list[int], Any]] = []
        self.by_rank: dict[int, subprocess.Popen[bytes]] = {}
        self._stopped_since: dict[int, float] = {}

    def start(self, ranks: Sequence[int], **more: str) -> None:
        """Start these ranks, with ``more`` in their environment."""
        main = self._main if self._main is not None and can_be_copied() else None
        words = (list(self._arguments),) if main else ("-u", "-m", "bytescale", *self._arguments)
        own = {"RANK", "LOCAL_RANK"}
        context: Any = (Copies if main else SubprocessContext)(
            name="rank",
            entrypoint=main or sys.executable,  # type: ignore[arg-type]
            args=dict.fromkeys(range(len(ranks)), words),
            envs={
                number: {**self._environment, **more, **dict.fromkeys(own, str(rank))}
                for number, rank in enumerate(ranks)
            },
            logs_specs=DefaultLogsSpecs(log_dir=mkdtemp(dir=self._folder)),
        )
        self._contexts.append((list(ranks), context))
        context.start()
        self.by_rank |= {ranks[number]: handler.proc for number, handler in context.subprocess_handlers.items()}

    def silent(self, seconds: float) -> list[int]:
        """Ranks that have been stopped (SIGSTOP) for so long, as far as calls of this have seen."""
        now = time.monotonic()
        alive = [rank for rank, process in self.by_rank.items() if process.poll() is None]
        stopped = [rank for rank in alive if is_stopped(self.by_rank[rank].pid)]
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in stopped}
        return [rank for rank, since in self._stopped_since.items() if now - since > seconds]

    def close(self, death: signal.Signals, timeout: int) -> None:
        """Send ``death`` to all that run, and kill those that have not ended ``timeout`` seconds later."""
        for _, context in self._contexts:
            context.close(death, timeout=timeout)

    def failures(self) -> dict[int, ProcessFailure]:
        """What ended with an error, by rank: of each rank the last process. All have ended."""
        found: dict[int, ProcessFailure] = {}
        for ranks, context in self._contexts:
            ended = context.wait(period=_LOOK_SECONDS)
            assert ended is not None, "without a time limit, wait returns a result"
            found |= {ranks[number]: failure for number, failure in ended.failures.items()}
        return found
