"""Measures one rank's work in a step: the seconds that it computes, and the bytes of attention that it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from bytescale.attention.clock import Clock, make_clock
from bytescale.runtime import Mesh


class RankWork:
    """What ``measured_work`` has measured. On a GPU, it may be read only when the host has waited for the device."""

    def __init__(self, mesh: Mesh) -> None:
        self._rings = [group.exchange for group in mesh.ring_groups()]
        self._sent_before = self._all_bytes_sent()
        self._run: Callable[[], float] = lambda: 0.0
        self._waits: Sequence[Callable[[], float]] = ()
        self._sync = make_clock(mesh.world.device)

    def ends(self, run: Clock, waits: Sequence[Clock]) -> None:
        """Take the times of the clocks: of the whole block, and of the waits in it."""
        self._run, self._waits = run.take(), [clock.take() for clock in waits]

    def busy_seconds(self) -> float:
        """Return the seconds of the block that this rank did not spend waiting for others."""
        return self._run() - self.waiting_seconds()

    def waiting_seconds(self) -> float:
        """Return the seconds of the block that this rank spent waiting for others."""
        return sum(read() for read in self._waits)

    def sync(self) -> AbstractContextManager[None]:
        """Measure the reduction of gradients, which is the block."""
        return self._sync.span()

    def sync_seconds(self) -> float:
        """Return the seconds of the reduction so far, with the wait for ranks that compute longer."""
        return self._sync.take()()

    def bytes_sent(self) -> int:
        """Return the bytes that rings have sent since the block began."""
        return self._all_bytes_sent() - self._sent_before

    def _all_bytes_sent(self) -> int:
        return sum(ring.bytes_sent for ring in self._rings)


@contextmanager
def measured_work(mesh: Mesh, device: torch.device) -> Iterator[RankWork]:
    """Measure this rank's work in the block."""
    work, run, waits = RankWork(mesh), make_clock(device), clocks_of(mesh)
    for clock in waits:
        clock.take()
    with run.span():
        yield work
    work.ends(run, waits)


def clocks_of(mesh: Mesh) -> list[Clock]:
    """The clocks that run while this rank waits for others."""
    return [clock for clocks in named_clocks(mesh).values() for clock in clocks]


def named_clocks(mesh: Mesh) -> dict[str, list[Clock]]:
    """The same clocks, each once, by what the rank waits for."""
    rings, stages = mesh.ring_groups(), mesh.pipeline_groups()
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
