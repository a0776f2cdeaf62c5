"""Clocks that measure what a rank really spends on something, on a CPU and on a GPU.

On a GPU a wait returns to the host at once and holds up the compute stream instead, so that the host's clock around it
measures nothing. There events are recorded on the stream before and after, and read when the host knows that the device
has come that far.
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
    """Adds up the time of all spans."""

    def span(self) -> AbstractContextManager[None]:
        """What the block takes counts; on a GPU, what the current stream takes from its beginning to its end."""
        ...

    def take(self) -> Callable[[], float]:
        """Begin anew. Returns how to read the seconds so far: on a GPU, reading waits for the last of these spans."""
        ...

    def tell(self, listener: Listener | None) -> None:
        """Call ``listener`` after every further span, with the span's marks (``seconds_between``). None: no longer."""
        ...


class HostClock:
    """The host's own time."""

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
    """The time of a device's current stream, between events."""

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
    """Seconds from one mark to another of the same device. On a GPU, the host waits until the device has reached both.

    The result is negative if ``end`` came first.
    """
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float), "marks of the host and of a device do not compare"
        assert isinstance(end, float), "marks of the host and of a device do not compare"
        return end - start
    start.synchronize()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def make_clock(device: torch.device) -> Clock:
    """The clock for what runs on ``device``."""
    if device.type == "cuda":
        return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[arg-type,return-value]
    return HostClock()
