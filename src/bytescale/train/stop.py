"""SIGTERM, which clusters send before they take a machine away, and Ctrl-C: finish the step, save, and end well."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from bytescale.common.errors import foreseen

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def said_when_stopped(where: str) -> Iterator[None]:
    """Let SIGTERM and SIGINT end this program with a word while the block runs: "stopped by SIGTERM ``where``"."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        print(f"\nstopped by {signal.Signals(number).name} {where}", file=sys.stderr, flush=True)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def record_for_launcher(error: BaseException) -> None:
    """Write the error where the launcher, if there is one, looks for it. It then knows whose error came first."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(foreseen(error, "train"))


class StopRequest:
    """Catches SIGTERM and SIGINT while its ``with`` block runs. All ranks then agree after which step they stop."""

    def __init__(self, *, tells: bool = False) -> None:
        """``tells``: whether this process writes what happens now to standard error, because no launcher does."""
        self.heard = False
        """Whether this rank was asked to stop."""
        self.signal = signal.SIGTERM
        """Which signal asked."""
        self.agreed = False
        """Whether any rank was asked to stop. After each step, this is the same on every rank."""
        self.early = False
        """Whether that was before the last step."""
        self._tells = tells
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        # Only the main thread can have signal handlers. Ranks in other threads (tests) are stopped by their owner.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard, self.signal = True, signal.Signals(number)
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)  # a second one ends the process at once
        if self._tells:  # by the system call: a handler may interrupt Python's own writing
            text = f"\n{self.signal.name}: finishing the step and saving; a second signal ends the run at once\n"
            os.write(2, text.encode())
