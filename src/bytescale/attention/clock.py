"""Clocks that measure how long a rank really computes or waits, on a CPU and on a GPU.

On a GPU, waiting for a message returns to the host at once. It holds up the compute stream instead, so the host's clock
would measure nothing. A GPU's clock therefore records one event on the stream before the wait and one after it. It
reads them later, when the device has passed both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Event(Protocol):
    """A ``torch.cuda.Event`` with ``enable_timing``."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds."""
        ...


Mark = float | Event
"""A moment: the host's ``time.perf_counter``, or an event on a device's stream."""
Listener = Callable[[Mark, Mark], None]
"""Is told where a span began and where it ended."""


class Clock(Protocol):
    """Adds up the durations of all its spans."""

    def span(self) -> AbstractContextManager[None]:
        """Measure the block: on a GPU, the time that the current stream takes from its start to its end."""
        ...

    def take(self) -> Callable[[], float]:
        """Reset the clock, and return a function that gives the seconds measured until now.

        On a GPU, calling that function waits until the device has finished the last span.
        """
        ...

    def tell(self, listener: Listener | None) -> None:
        """Call ``listener`` after every further span, with the span's marks (``seconds_between``). None: no longer."""
        ...


class HostClock:
    """Measures with the host's own clock."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._listener: Listener | None = None

    @contextmanager
    def span(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self._seconds += ended - started
            if self._listener is not None:
                self._listener(started, ended)

    def take(self) -> Callable[[], float]:
        seconds, self._seconds = self._seconds, 0.0
        return lambda: seconds

    def tell(self, listener: Listener | None) -> None:
        self._listener = listener


class DeviceClock:
    """Measures the time between events on a device's current stream."""

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._spans: list[tuple[Event, Event]] = []
        self._listener: Listener | None = None

    @contextmanager
    def span(self) -> Iterator[None]:
        start, end = self._make_event(), self._make_event()
        start.record()
        try:
            yield
        finally:
            end.record()
            self._spans.append((start, end))
            if self._listener is not None:
                self._listener(start, end)

    def take(self) -> Callable[[], float]:
        spans, self._spans = self._spans, []

        def read() -> float:
            if spans:
                spans[-1][1].synchronize()
            return sum(start.elapsed_time(end) for start, end in spans) / 1e3

        return read

    def tell(self, listener: Listener | None) -> None:
        self._listener = listener


def seconds_between(start: Mark, end: Mark) -> float:
    """Seconds from one mark to a later one of the same device. On a GPU, the host waits until the device is there."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float), "marks of the host and of a device do not compare"
        assert isinstance(end, float), "marks of the host and of a device do not compare"
        return end - start
    start.synchronize()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def make_clock(device: torch.device) -> Clock:
    """Return a clock for work on ``device``."""
    if device.type == "cuda":
        return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[arg-type,return-value]
    return HostClock()
