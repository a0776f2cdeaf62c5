"""The trace of a real step: what every rank did, beside what the simulator predicted for the same plan.

It is Chrome trace JSON as of a simulated step (``simulator.trace``): one process per HDP rank, with one thread a stage
of what was measured (one for every tensor-parallel rank) and one of what was predicted. In both, time 0 is the moment
at which all ranks start their first micro-batch; the file is shifted, so that no time is below 0.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bytescale.common.atomic import whole_file
from bytescale.simulator.trace import Track, entries_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMetadata:
    """What a trace says about its step as a whole."""

    step: int
    measured_seconds: float
    """Of the step, with the wait for its data: ``step_seconds`` in metrics.jsonl."""
    predicted_seconds: float
    """Of the simulated step, which has its data at once."""
    prediction: str
    """The name of the profile that the simulated step's times come from."""
    num_ranks: int
    """HDP ranks of the run. A trace has some of them if there are very many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """A step as it was and as it was predicted, by the ``kind`` of tracks."""

    metadata: TraceMetadata
    tracks: list[Track]


def save_step_trace(trace: StepTrace, path: Path) -> None:
    """Write ``trace`` to ``path`` atomically."""
    shift = max(0.0, -min((span.start for track in trace.tracks for span in track.spans), default=0.0))
    content = {
        "traceEvents": entries_of(sorted(trace.tracks, key=track_place), shift_seconds=shift),
        "displayTimeUnit": "ms",
        "otherData": {**asdict(trace.metadata), "shift_seconds": shift},
    }
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(content), encoding="utf-8")


def track_place(track: Track) -> tuple[int, int, str, str]:
    """Sorts tracks by rank, by stage as a number, what was measured first, and by what follows in the name."""
    stage, _, rest = track.name.partition(", ")
    return track.rank, int(stage.removeprefix("stage ")), track.kind, rest
