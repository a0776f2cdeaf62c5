"""Records when this rank ran each part of a step: on a CPU by the host's clock, on a GPU by events on its stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from bytescale.attention.clock import Listener, Mark, make_clock, seconds_between
from bytescale.plan import RankPlan
from bytescale.runtime import Mesh
from bytescale.runtime.pipeline import Action
from bytescale.simulator.trace import Span, task_name
from bytescale.train.reporting.work import named_clocks


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
            clock.tell(self._listener("wait", f"wait: {name}", {}))

    @contextmanager
    def span(self, category: str, name: str = "", about: Mapping[str, Any] | None = None) -> Iterator[None]:
        clock = make_clock(self._device)
        clock.tell(self._listener(category, name or category, about or {}))
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
            clock.tell(None)
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
