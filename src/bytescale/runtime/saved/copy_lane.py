"""Copies in one direction between device and host, concurrent with compute and ordered against it by events alone.

On CUDA the copies run on a CUDA stream of their own. On the CPU a copy is done at once and every event is None. Nothing
here ever makes the host wait.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Event = torch.cuda.Event | None
"""A point in the work of a stream that other streams can wait for; None: it has already been reached."""


class CopyLane:
    """A CUDA stream (nothing on the CPU) that makes copies in the order in which they were requested."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], *, after: Iterable[Event]) -> Event:
        """Copy ``(to, from)`` pairs of contiguous tensors of equal size, once all events in ``after`` have happened.

        Returns the event of the copies' completion.
        """
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
        """The event that happens when all copies requested so far are complete."""
        return None if self._stream is None else self._stream.record_event()


def compute_mark(device: torch.device) -> Event:
    """The event that happens when everything launched on the current (compute) stream so far is complete."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def compute_waits(event: Event, device: torch.device) -> None:
    """Make everything that is launched on the current stream from now on wait for ``event``."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
