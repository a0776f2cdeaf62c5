"""Copy lanes on a CPU that copy as late as CUDA allows, so that every missing event leads to wrong results.

A copy is made only when its event is waited for, or when a later copy of its lane has to run. Its memory is not kept
alive meanwhile. Code that frees the memory, or uses a page again, without an event in between therefore fails. The
compute stream is the program itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bytescale.runtime.optimizer import host_states
from bytescale.runtime.saved import offload


@dataclass
class LazyEvent:
    """The first ``count`` copies of a lane."""

    lane: LazyLane
    count: int

    def synchronize(self) -> None:
        self.lane.run(self.count)


class LazyLane:
    """``runtime.saved.copy_lane.CopyLane`` that puts everything off."""

    def __init__(self, device: torch.device) -> None:
        self._copies: list[tuple[list[tuple[_Region, _Region]], list[LazyEvent | None]]] = []
        self._done = 0

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], *, after: Iterable[LazyEvent | None]) -> LazyEvent:
        self._copies.append(([(_Region(to), _Region(source)) for to, source in pairs], list(after)))
        return self.mark()

    def mark(self) -> LazyEvent:
        return LazyEvent(self, len(self._copies))

    def run(self, count: int) -> None:
        """The first ``count`` copies, each after what it has to wait for."""
        while self._done < count:
            pairs, after = self._copies[self._done]
            self._done += 1
            for event in after:
                wait(event)
            for to, source in pairs:
                to.tensor().copy_(source.tensor())


def wait(event: LazyEvent | None, device: torch.device | None = None) -> None:
    """As the compute stream does."""
    if event is not None:
        event.lane.run(event.count)


def use_lazy_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For offloads, and optimizers in host memory, made during a test."""
    for module in (offload, host_states):
        monkeypatch.setattr(module, "CopyLane", LazyLane)
        monkeypatch.setattr(module, "compute_waits", wait)


class _Region:
    """Some bytes that somebody else has to keep alive."""

    def __init__(self, rows: Tensor) -> None:
        assert rows.is_contiguous(), "lanes copy whole stretches of memory"
        self._storage = weakref.ref(rows.untyped_storage())
        self._start, self._size = rows.storage_offset() * rows.element_size(), rows.nbytes

    def tensor(self) -> Tensor:
        storage = self._storage()
        assert storage is not None, "memory was given back while a copy of it was under way"
        return torch.empty(0, dtype=torch.uint8).set_(storage, self._start, (self._size,))
