"""One direction of copies between device and host, beside the computing and ordered against it by events alone.

On CUDA a lane is a stream: copies of pinned memory run on a DMA engine and take no multiprocessor. On CPU a copy is
done at once and every event is None, so that all logic above runs, and is tested, without a GPU. Nothing here ever
makes the host wait.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Event = torch.cuda.Event | None
"""Something that will have happened; None has happened."""


class CopyLane:
    """Copies in the order in which they were asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], *, after: Iterable[Event]) -> Event:
        """Copy ``(to, from)`` pairs, equally large and contiguous, after some events; the event of their completion."""
        if self._stream is None:
            for destination, source in pairs:
                destination.copy_(source)
            return None
        for event in after:
            if event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        return self.mark()

    def mark(self) -> Event:
        """The completion of everything asked for so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


def compute_mark(device: torch.device) -> Event:
    """The completion of everything that was launched on the current (compute) stream so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def compute_waits(event: Event, device: torch.device) -> None:
    """Nothing launched on the current stream from now on starts before ``event``."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
