"""SIGTERM, which clusters send before they take a machine away: finish the step, save, and end well."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Catches SIGTERM while its ``with`` block runs. All ranks then have to agree on the step after which they stop."""

    def __init__(self) -> None:
        self.heard = False
        """Whether this rank was asked to stop."""
        self.agreed = False
        """Whether any rank was asked to stop. After each step, this is the same on every rank."""
        self._before: Any = None

    def __enter__(self) -> StopRequest:
        # Only the main thread can have signal handlers. Ranks in other threads (tests) are stopped by their owner.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM ends the process at once
