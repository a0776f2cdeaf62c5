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


class Clock(Protocol):
    """Adds up the time of all spans."""

    def span(self) -> AbstractContextManager[None]:
        """What the block takes counts; on a GPU, what the current stream takes from its beginning to its end."""
        ...

    def take(self) -> Callable[[], float]:
        """Begin anew. Returns how to read the seconds so far: on a GPU, reading waits for the last of these spans."""
        ...


class HostClock:
    """The host's own time."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def span(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - started

    def take(self) -> Callable[[], float]:
        seconds, self._seconds = self._seconds, 0.0
        return lambda: seconds


class Event(Protocol):
    """A ``torch.cuda.Event`` with ``enable_timing``."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds."""
        ...


class DeviceClock:
    """The time of a device's current stream, between events."""

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._spans: list[tuple[Event, Event]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        start, end = self._make_event(), self._make_event()
        start.record()
        try:
            yield
        finally:
            end.record()
            self._spans.append((start, end))

    def take(self) -> Callable[[], float]:
        spans, self._spans = self._spans, []

        def read() -> float:
            if spans:
                spans[-1][1].synchronize()
            return sum(start.elapsed_time(end) for start, end in spans) / 1e3

        return read


def make_clock(device: torch.device) -> Clock:
    """The clock for what runs on ``device``."""
    if device.type == "cuda":
        return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[arg-type,return-value]
    return HostClock()
