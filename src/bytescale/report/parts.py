"""Where the time of steps went, and what was predicted: computed from metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple, TypeVar

from bytescale.report.runs import RunRecord

PARTS = ("compute", "encode", "waiting", "sync", "data", "other")
"""Compute: forward and backward. Encode: pictures, around these. Waiting: for other ranks, inside these. Sync: from the
last backward until gradients are reduced, with the wait for slower ranks. Data: for the loader. Other: the rest."""
WARM_UP = 2
"""First steps that do not count for medians, if there are more: they load libraries and fill caches."""
Item = TypeVar("Item")


def step_parts(line: dict[str, Any]) -> dict[str, float]:
    """Split the seconds of a step, one line of metrics.jsonl, into ``PARTS``, which add up to it. Means over ranks."""
    left, seconds = float(line["step_seconds"]), {}
    found = {
        "compute": left * (1.0 - float(line["waiting_share"])),
        "encode": float(line.get("encode_seconds", 0.0)),  # runs of before did not tell
        "waiting": float(line["waiting_seconds"]),
        "sync": float(line["sync_seconds"]),
        "data": float(line["data_wait_seconds"]),
    }
    for part, value in found.items():  # data is the slowest rank's, so that the sum may exceed the step a little
        seconds[part] = min(left, value)
        left -= seconds[part]
    return {**seconds, "other": left}


def warm(items: Sequence[Item]) -> Sequence[Item]:
    """The items of a run's steps after its first ones; all of them if there are no more."""
    return items[WARM_UP:] if len(items) > WARM_UP else items


def mean_parts(run: RunRecord) -> dict[str, float]:
    """Mean seconds of each part over the warm steps of a run that has steps."""
    steps = [step_parts(line) for line in warm(run.steps)]
    return {name: sum(parts[name] for parts in steps) / len(steps) for name in PARTS}


def typical(run: RunRecord, name: str) -> float | None:
    """The median of a number of metrics.jsonl over the warm steps; None if no step has it."""
    values = [value for value in warm(run.column(name)) if value is not None]
    return median(values) if values else None


class Forecast(NamedTuple):
    step: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Return ``1 - predicted / measured``. 0.5: the step took twice the predicted time; below 0: it took less."""
        return 1.0 - self.predicted / self.measured


def forecasts(run: RunRecord) -> list[Forecast]:
    """Of all steps whose metrics have a prediction."""
    columns = zip(run.step_numbers, run.column("predicted_seconds"), run.column("step_seconds"), strict=True)
    return [Forecast(step, predicted, measured) for step, predicted, measured in columns if predicted and measured]
