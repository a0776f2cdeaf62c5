"""Where the time of steps went: all steps from metrics.jsonl, traced steps span by span."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bytescale.report.runs import RunRecord
from bytescale.simulator.step_trace import StepTrace
from bytescale.simulator.trace import Span, Track

PARTS = ("compute", "waiting", "sync", "data", "other")
"""Compute: forward and backward. Waiting: for other ranks, inside these. Sync: from the last backward until gradients
are reduced, with the wait for slower ranks. Data: for the loader. Other: the update, and agreement of the ranks."""
WARM_UP = 2
"""First steps that do not count for medians, if there are more: they load libraries and fill caches."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Mean seconds of a rank. The parts add up to the step."""

    step: int
    step_seconds: float
    seconds: dict[str, float]  # by the names of PARTS


def step_parts(line: dict[str, Any]) -> StepParts:
    """Split one line of metrics.jsonl. In lines of old versions, waiting is all that is neither compute nor data."""
    total = float(line["step_seconds"])
    compute = total * (1.0 - float(line["waiting_share"]))
    found = {
        "compute": compute,
        "waiting": float(line.get("waiting_seconds", total - compute - float(line["data_wait_seconds"]))),
        "sync": float(line.get("sync_seconds", 0.0)),
        "data": float(line["data_wait_seconds"]),
    }
    left, seconds = total, {}
    for part, value in found.items():  # data is the slowest rank's, so that the sum may exceed the step a little
        seconds[part] = min(left, value)
        left -= seconds[part]
    return StepParts(step=int(line["step"]), step_seconds=total, seconds={**seconds, "other": left})


def all_parts(run: RunRecord) -> list[StepParts]:
    """The parts of every step of a run."""
    return [step_parts(line) for line in run.steps]


def warm(items: list[Any]) -> list[Any]:
    """The items of a run's steps after its first ones; all of them if there are no more."""
    return items[WARM_UP:] if len(items) > WARM_UP else items


def mean_parts(parts: list[StepParts]) -> dict[str, float]:
    """Mean seconds of each part over steps."""
    return {name: sum(step.seconds[name] for step in parts) / len(parts) for name in PARTS}


def typical(run: RunRecord, name: str) -> float | None:
    """The median of a number of metrics.jsonl over the warm steps; None if no step has it."""
    values = [value for value in warm(run.column(name)) if value is not None]
    return median(values) if values else None


def waits_of(spans: Sequence[Span]) -> list[Span]:
    """The waits for other ranks in and between forwards and backwards. Those of the step's beginning and end, such as
    the reduction's, belong to spans of their own."""
    outer = [span for span in spans if span.category in ("agree", "reduction", "report", "update")]
    return [span for span in spans if span.category == "wait" and not _is_inside(span, outer)]


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """A track of a traced step, added up. Seconds."""

    rank: int
    name: str
    compute: float  # forward and backward without the waits inside
    predicted_compute: float | None  # of the same track; None: the trace has none. Exposed ring time included
    ring: float  # waits for the ring
    other_waits: float  # waits for other ranks inside forward and backward, and between them for other stages
    sync: float
    data: float
    update: float


def rank_times(trace: StepTrace) -> list[RankTimes]:
    """One entry per measured track."""
    predicted = {(track.rank, track.name): track for track in trace.predicted}
    return [_times_of(track, predicted.get((track.rank, track.name.partition(", tp")[0]))) for track in trace.measured]


def _times_of(track: Track, predicted: Track | None) -> RankTimes:
    def total(*categories: str) -> float:
        return sum(span.seconds for span in track.spans if span.category in categories)

    tasks = [span for span in track.spans if span.category in ("forward", "backward")]
    waits = waits_of(track.spans)
    inside = [wait for wait in waits if _is_inside(wait, tasks)]
    ring = sum(wait.seconds for wait in waits if wait.name == "wait: ring")
    return RankTimes(
        rank=track.rank,
        name=track.name,
        compute=total("forward", "backward") - sum(wait.seconds for wait in inside),
        predicted_compute=None
        if predicted is None
        else sum(span.seconds for span in predicted.spans if span.category in ("forward", "backward")),
        ring=ring,
        other_waits=sum(wait.seconds for wait in waits) - ring,
        sync=total("reduction"),
        data=total("data"),
        update=total("update", "report", "agree"),
    )


def _is_inside(span: Span, others: list[Span]) -> bool:
    middle = span.start + span.seconds / 2
    return any(other.start <= middle <= other.end for other in others)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A predicted and a measured step time."""

    step: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Return ``1 - predicted / measured``. 0.5: the step took twice the predicted time; below 0: it took less."""
        return 1.0 - self.predicted / self.measured


def forecasts(run: RunRecord) -> list[Forecast]:
    """Of all steps whose metrics have a prediction; otherwise of the traced steps, without the wait for their data."""
    found = [
        Forecast(
            step=int(line["step"]), predicted=float(line["predicted_seconds"]), measured=float(line["step_seconds"])
        )
        for line in run.steps
        if isinstance(line.get("predicted_seconds"), int | float) and line["predicted_seconds"] > 0
    ]
    if found:
        return found
    measured = {int(line["step"]): _without_data(line) for line in run.steps}
    return [
        Forecast(
            step=trace.metadata.step,
            predicted=trace.metadata.predicted_seconds,
            measured=measured.get(trace.metadata.step, trace.metadata.measured_seconds),
        )
        for trace in run.traces
    ]


def _without_data(line: dict[str, Any]) -> float:
    """A step's seconds without the wait for its data, which predictions leave out."""
    return max(1e-9, float(line["step_seconds"]) - float(line["data_wait_seconds"]))
