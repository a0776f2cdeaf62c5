"""Measures one rank's work in a step: how long it computes and waits, the bytes of attention that it sends, and when.

Times are those of the host's clock on a CPU, and of events on the stream on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from bytescale.attention.clock import Clock, Listener, Mark, make_clock, seconds_between
from bytescale.plan import RankPlan
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.pipeline import Action
from bytescale.simulator.trace import Span, task_name


class RankWork:
    """This rank's work in a step. On a GPU, it may be read only when the host has waited for the device."""

    def __init__(self, mesh: Mesh) -> None:
        self._rings = [group.exchange for group in mesh.ring_groups()]
        self._waits = [clock for clocks in named_clocks(mesh).values() for clock in clocks]
        self._passes, self._sync, self.encoding = (make_clock(mesh.world.device) for _ in range(3))
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


class StepRecorder:
    """The recorder of a step whose trace nobody wants: it records nothing."""

    def span(
        self, category: str, name: str = "", about: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[None]:
        """Record when the block runs. ``name``: what the trace calls it, if not by its category."""
        return nullcontext()

    def around(self, plan: RankPlan) -> Callable[[Action], AbstractContextManager[None]]:
        """Return what records each forward and each backward of ``plan``, for ``Executor.run``."""
        return lambda action: nullcontext()


class SpanRecorder(StepRecorder):
    """Records one step, from when it is made. It never makes the host wait for its device before ``finish``."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, str, Mapping[str, Any], Mark, Mark]] = []
        self._waits = [(clock, name) for name, clocks in named_clocks(mesh).items() for clock in clocks]
        for clock, name in self._waits:
            clock.listen(self._listener("wait", f"wait: {name}", {}))

    @contextmanager
    def span(self, category: str, name: str = "", about: Mapping[str, Any] | None = None) -> Iterator[None]:
        clock = make_clock(self._device)
        clock.listen(self._listener(category, name or category, about or {}))
        with clock.span():
            yield

    def around(self, plan: RankPlan) -> Callable[[Action], AbstractContextManager[None]]:
        def span(action: Action) -> AbstractContextManager[None]:
            backward, index = action
            micro_batch = plan.micro_batches[index]
            category = "backward" if backward else "forward"
            shared = micro_batch.shared
            name = task_name(category, shared.size if shared else 1)
            tokens = {"tokens": micro_batch.num_tokens, "shared tokens of this rank": micro_batch.num_shared_tokens}
            return self.span(category, name, {"micro-batch": index, **tokens})

        return span

    def finish(self, origin: str) -> list[Span]:
        """Stop, and return what was recorded, in seconds after the end of the first span of category ``origin``.

        Nothing may have been recorded before this span began, because a GPU measures times from its beginning. On a
        GPU, the host waits until the device has done all of it.
        """
        for clock, _ in self._waits:
            clock.listen(None)
        first, start = next((began, ended) for category, _, _, began, ended in self._spans if category == origin)
        before = seconds_between(first, start)
        return [
            Span(
                name=name,
                category=category,
                start=seconds_between(first, began) - before,
                seconds=seconds_between(began, ended),
                about=dict(about),
            )
            for category, name, about, began, ended in self._spans
        ]

    def _listener(self, category: str, name: str, about: Mapping[str, Any]) -> Listener:
        return lambda began, ended: self._spans.append((category, name, about, began, ended))


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
