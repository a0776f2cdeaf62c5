"""Vector clocks: what has certainly happened before what, on the host, on streams, and in communicators.

A timeline is the host of a rank or one of its streams. Its operations follow each other, and each has a number there.
What a timeline knows of the others is the number of their last operation that must be over before its own next one. A
launch, an event that is waited for, and a synchronisation of the host are the only ways in which it comes to know more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Clock = dict[int, int]
"""Timeline -> number of its last operation that is known to be over."""


class Moment(NamedTuple):
    """The operation of this number on a timeline."""

    timeline: int
    number: int


def join(clock: Clock, other: Clock) -> None:
    """Let ``clock`` know what ``other`` knows, too."""
    for timeline, number in other.items():
        if number > clock.get(timeline, 0):
            clock[timeline] = number


class Timeline:
    """The host, or a stream of the device."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.clock: Clock = {number: 0}

    def advance(self) -> Moment:
        """The next operation."""
        self.clock[self.number] += 1
        return Moment(self.number, self.clock[self.number])

    def knows(self, moment: Moment) -> bool:
        """Whether the operation is over before the next one of this timeline begins."""
        return self.clock.get(moment.timeline, 0) >= moment.number


class Stream(Timeline):
    """Stands for ``torch.cuda.Stream``."""

    def __init__(self, machine: Any, number: int, name: str) -> None:
        super().__init__(number, name)
        self.machine = machine

    def launch(self) -> Moment:
        """The next operation, which comes after all that the host knows to be over."""
        join(self.clock, self.machine.host.clock)
        return self.advance()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        join(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        join(self.clock, stream.clock)

    def synchronize(self) -> None:
        self.machine.host_waits("Stream.synchronize", self.clock)

    def is_capturing(self) -> bool:
        return False

    def query(self) -> bool:
        raise AssertionError("whether a stream is done depends on time: nothing may be decided by it")


class Event:
    """Stands for ``torch.cuda.Event``. Waiting for one that was never recorded waits for nothing, as on CUDA."""

    def __init__(self, **options: Any) -> None:
        del options
        self.clock: Clock = {}
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        from tests.accelerator.device import machine

        self._stream = stream or machine().current
        self.clock = dict(self._stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        from tests.accelerator.device import machine

        (stream or machine().current).wait_event(self)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.machine.host_waits("Event.synchronize", self.clock)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds; this device takes none."""
        assert self._stream is not None, "the event was recorded"
        assert end_event._stream is not None, "the event was recorded"
        return 0.0
