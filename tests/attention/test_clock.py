"""Clocks on a CPU, and on a stand-in for a GPU whose times are a list."""

from __future__ import annotations

import time

import pytest
import torch

from bytescale.attention.clock import Clock, HostMoment, Mark, make_clock, seconds_between


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
    run, wait = (Clock(lambda: FakeEvent(device)) for _ in range(2))
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
    clock = Clock()
    started = time.perf_counter()
    with clock.span():
        time.sleep(0.01)
    with clock.span():
        time.sleep(0.01)
    read = clock.take()
    assert 0.02 <= read() <= time.perf_counter() - started
    assert clock.take()() == 0.0
    with make_clock(torch.device("cpu")).span():
        pass


def test_a_listener_learns_when_spans_ran_without_waiting_for_the_device() -> None:
    device = FakeDevice()
    run, wait = (Clock(lambda: FakeEvent(device)) for _ in range(2))
    told: list[tuple[str, Mark, Mark]] = []
    run.listen(lambda start, end: told.append(("run", start, end)))
    wait.listen(lambda start, end: told.append(("wait", start, end)))
    device.run(1.0)
    with run.span():
        device.run(2.0)
        with wait.span():
            device.run(0.5)
        device.run(1.0)
    wait.listen(None)
    with wait.span():
        device.run(9.0)
    assert [name for name, _, _ in told] == ["wait", "run"]
    assert all(isinstance(mark, FakeEvent) and mark.seconds is None for _, *marks in told for mark in marks)
    (_, wait_start, wait_end), (_, run_start, run_end) = told
    assert seconds_between(run_start, run_end) == pytest.approx(3.5)
    assert seconds_between(run_start, wait_start) == pytest.approx(2.0)
    assert seconds_between(run_start, wait_end) == pytest.approx(2.5)
    assert run.take()() == pytest.approx(3.5)  # the listener takes nothing away


def test_a_clock_that_nobody_reads_forgets_no_second_and_keeps_few_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bytescale.attention.clock._MOST_KEPT", 4)
    device = FakeDevice()
    clock = Clock(lambda: FakeEvent(device))
    for _ in range(10):
        with clock.span():
            device.run(2.0)
        assert len(clock._spans) <= 4
        assert all(end.seconds is None for _, end in clock._spans[-2:]), "the host has waited for what it just launched"
    assert clock.take()() == pytest.approx(20.0)
    assert clock.take()() == 0.0


def test_the_hosts_marks_are_its_own_time() -> None:
    clock, told = Clock(), []
    clock.listen(lambda start, end: told.append((start, end)))
    before = HostMoment()
    before.record()
    with clock.span():
        time.sleep(0.01)
    ((start, end),) = told
    assert seconds_between(before, start) >= 0
    assert seconds_between(start, end) == clock.take()()
