"""What a step says of its data: a row of numbers per rank, exchanged with the losses, and metrics made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bytescale.data.loader import LoaderTimes


def loader_row(times: LoaderTimes) -> list[float]:
    """What one rank tells the others."""
    return [
        times.wait_seconds,
        times.planning_seconds,
        float(times.bytes_read),
        float(times.bytes_received),
        float(times.steps_ready),
        float(times.steps_planned),
        float(times.restarts),
    ]


def loader_metrics(columns: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Fields of ``StepMetrics`` from the columns of all ranks' rows, in the order of ``loader_row``."""
    waits, planning, read, received, ready, planned, restarts = columns
    return {
        "data_wait_seconds": max(waits),
        "planning_seconds": max(planning),
        "data_bytes_read": [int(number) for number in read],
        "data_bytes_received": [int(number) for number in received],
        "data_steps_ready": int(min(ready)),
        "data_steps_planned": int(min(planned)),
        "data_restarts": int(max(restarts)),
    }
