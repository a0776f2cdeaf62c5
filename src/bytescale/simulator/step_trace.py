"""The trace of a real step: what every rank did, beside what the simulator predicted for the same plan.

It is Chrome trace JSON as of a simulated step (``simulator.trace``): one process per HDP rank, with one thread a stage
of what was measured (one for every tensor-parallel rank) and one of what was predicted. In both, time 0 is the moment
at which all ranks start their first micro-batch; the file is shifted, so that no time is below 0.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from bytescale.common.atomic import whole_file
from bytescale.common.errors import ConfigError
from bytescale.common.parsing import parse_json
from bytescale.simulator.trace import MICRO, Span, Track, entries_of


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


def load_step_trace(path: Path) -> StepTrace:
    """Read what ``save_step_trace`` wrote. Raises ``ConfigError`` when the file is something else."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        about = dict(content["otherData"])
        shift = float(about.pop("shift_seconds"))
        tracks = _tracks(content["traceEvents"], shift)
        metadata = TraceMetadata(**about)
        if not any(track.spans for track in tracks):
            raise ValueError("it holds nothing that was measured")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not the trace of a step ({type(error).__name__}: {error})",
            fix="name a file from a run folder's traces/, or take the trace again",
        ) from error
    return StepTrace(metadata=metadata, tracks=tracks)


def track_place(track: Track) -> tuple[int, int, str, str]:
    """Sorts tracks by rank, by stage as a number, what was measured first, and by what follows in the name."""
    stage, _, rest = track.name.partition(", ")
    return track.rank, int(stage.removeprefix("stage ")), track.kind, rest


def _tracks(entries: list[dict[str, Any]], shift: float) -> list[Track]:
    def place(entry: dict[str, Any]) -> tuple[int, int]:
        return entry["pid"], entry.get("tid", -1)

    tracks = []
    for (rank, thread), found in groupby(sorted(entries, key=place), key=place):
        if thread < 0:
            continue  # the name of the process
        own = list(found)
        (about,) = (entry["args"] for entry in own if entry["ph"] == "M")
        spans = [
            Span(
                name=entry["name"],
                category=entry["cat"],
                start=entry["ts"] / MICRO - shift,
                seconds=entry["dur"] / MICRO,
                about=entry["args"],
            )
            for entry in own
            if entry["ph"] == "X"
        ]
        tracks.append(Track(rank=rank, name=about["track"], spans=spans, kind=about["kind"]))
    return tracks
