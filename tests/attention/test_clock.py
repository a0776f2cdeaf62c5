"""Clocks on a CPU, and on a stand-in for a GPU whose times are a list."""

from __future__ import annotations

import time

import pytest
import torch

from bytescale.attention.clock import DeviceClock, HostClock, make_clock


class FakeDevice:
    """A stream that is behind its host: events get the stream's time when it comes to them."""

    def __init__(self) -> None:
        self.queue: list[float | FakeEvent] = []

    def run(self, seconds: float) -> None:
        """The host launches work, or a wait for a message, and goes on at once."""
        self.queue.append(seconds)

    def come_to(self, event: FakeEvent) -> None:
        now = 0.0
        for item in self.queue:
            if isinstance(item, FakeEvent):
                item.seconds = now
                if item is event:
                    return
            else:
                now += item


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.seconds: float | None = None

    def record(self) -> None:
        self.device.queue.append(self)

    def synchronize(self) -> None:
        self.device.come_to(self)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.seconds is not None, "read before the device has come that far"
        assert end_event.seconds is not None
        return 1e3 * (end_event.seconds - self.seconds)


def test_a_device_clock_measures_the_stream_and_not_the_host() -> None:
    device = FakeDevice()
    run, wait = (DeviceClock(lambda: FakeEvent(device)) for _ in range(2))
    with wait.span():
        device.run(7.0)
    wait.take()  # what was before the run does not count
    with run.span():
        device.run(2.0)
        with wait.span():
            device.run(0.5)
        device.run(1.0)
        with wait.span():
            device.run(0.25)
    read_run, read_wait = run.take(), wait.take()
    with wait.span():
        device.run(100.0)  # after the run
    assert read_run() == pytest.approx(3.75)
    assert read_wait() == pytest.approx(0.75)
    assert run.take()() == 0.0


def test_a_host_clock_measures_the_host() -> None:
    clock = HostClock()
    started = time.perf_counter()
    with clock.span():
        time.sleep(0.01)
    with clock.span():
        time.sleep(0.01)
    read = clock.take()
    assert 0.02 <= read() <= time.perf_counter() - started
    assert clock.take()() == 0.0
    assert isinstance(make_clock(torch.device("cpu")), HostClock)
    assert isinstance(make_clock(torch.device("cuda", 0)), DeviceClock)
