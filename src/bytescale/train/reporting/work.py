"""Measures one rank's work in a step: the seconds that it computes, and the bytes of attention that it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from bytescale.attention.clock import Clock, make_clock
from bytescale.runtime import Mesh


class RankWork:
    """This rank's work in a step. On a GPU, it may be read only when the host has waited for the device."""

    def __init__(self, mesh: Mesh) -> None:
        self._rings = [group.exchange for group in mesh.ring_groups()]
        self._waits = [clock for clocks in named_clocks(mesh).values() for clock in clocks]
        self._passes, self._sync = make_clock(mesh.world.device), make_clock(mesh.world.device)
        self._seconds: list[Callable[[], float]] = []  # of the passes, then of the waits inside
        self._sent_before = sum(ring.bytes_sent for ring in self._rings)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Measure the forwards and backwards, which are the block."""
        for clock in self._waits:
            clock.take()
        with self._passes.span():
            yield
        self._seconds = [clock.take() for clock in (self._passes, *self._waits)]

    def busy_seconds(self) -> float:
        """Return the seconds of the passes that this rank did not spend waiting for others."""
        return self._seconds[0]() - self.waiting_seconds()

    def waiting_seconds(self) -> float:
        """Return the seconds of the passes that this rank spent waiting for others."""
        return sum(read() for read in self._seconds[1:])

    def sync(self) -> AbstractContextManager[None]:
        """Measure the reduction of gradients, which is the block."""
        return self._sync.span()

    def sync_seconds(self) -> float:
        """Return the seconds of the reduction so far, with the wait for ranks that compute longer."""
        return self._sync.take()()

    def bytes_sent(self) -> int:
        """Return the bytes that rings have sent since the step began."""
        return sum(ring.bytes_sent for ring in self._rings) - self._sent_before


def named_clocks(mesh: Mesh) -> dict[str, list[Clock]]:
    """The clocks that run while this rank waits for others, each once, by what it waits for."""
    rings, stages = mesh.ring_groups(), [*mesh.forward, *mesh.backward]
    named = [("ring", group.exchange.clock) for group in rings]
    named += [("stages", group.exchange.clock) for group in stages]
    named += [("tensor parallel", mesh.tp.clock), ("all ranks", mesh.world.clock)]
    named += [("gradients, parameters", group.clock) for group in (mesh.gradients, mesh.domain, mesh.replicas)]
    for group in (mesh.world, mesh.gradients, mesh.tp, *rings, *stages):
        named += [("other ranks", group.clock), ("other ranks", group.exchange.clock)]
    found: dict[str, list[Clock]] = {name: [] for name, _ in named}
    for name, clock in named:
        if all(clock is not known for clocks in found.values() for known in clocks):
            found[name].append(clock)
    return found
