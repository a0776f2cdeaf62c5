"""Clocks that measure how long a rank really computes or waits, on a CPU and on a GPU.

On a GPU, waiting for a message holds up the compute stream and not the host. So a GPU's clock records one event on the
stream before the wait and one after it, and reads them later, when the device has passed both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

_MOST_KEPT = 4096
"""Spans after which the earlier half is added up. A GPU has passed its events long ago, so nothing waits."""


class Mark(Protocol):
    """A moment: a ``torch.cuda.Event`` with ``enable_timing``, or a ``HostMoment``."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds."""


Listener = Callable[[Mark, Mark], None]
"""Is told where a span began and where it ended."""


class HostMoment:
    """A moment by the host's own clock."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """It has passed."""

    def elapsed_time(self, end_event: HostMoment) -> float:
        return 1e3 * (end_event.seconds - self.seconds)


class Clock:
    """Adds up the durations of all its spans."""

    def __init__(self, make_mark: Callable[[], Mark] = HostMoment) -> None:
        self._make_mark = make_mark
        self._spans: list[tuple[Mark, Mark]] = []
        self._before = 0.0
        self._listener: Listener | None = None

    @contextmanager
    def span(self) -> Iterator[None]:
        """Measure the block: on a GPU, the time that the current stream takes from its start to its end."""
        start, end = self._make_mark(), self._make_mark()
        start.record()
        try:
            yield
        finally:
            end.record()
            self._spans.append((start, end))
            if len(self._spans) > _MOST_KEPT:
                early, self._spans = self._spans[: _MOST_KEPT // 2], self._spans[_MOST_KEPT // 2 :]
                self._before += sum(seconds_between(*span) for span in early)
            if self._listener is not None:
                self._listener(start, end)

    def take(self) -> Callable[[], float]:
        """Reset the clock, and return a function that gives the seconds measured until now.

        On a GPU, calling that function waits until the device has finished the last span.
        """
        spans, before = self._spans, self._before
        self._spans, self._before = [], 0.0
        return lambda: before + sum(seconds_between(*span) for span in spans)

    def listen(self, listener: Listener | None) -> None:
        """Call ``listener`` after every further span, with the span's marks (``seconds_between``). None: no longer."""
        self._listener = listener


def seconds_between(start: Mark, end: Mark) -> float:
    """Seconds from one mark to a later one of the same device. On a GPU, the host waits until the device is there."""
    start.synchronize()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def make_clock(device: torch.device) -> Clock:
    return Clock(lambda: torch.cuda.Event(enable_timing=True)) if device.type == "cuda" else Clock()
