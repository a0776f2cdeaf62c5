"""Writes simulated and real steps as Chrome trace JSON, to be opened in https://ui.perfetto.dev or chrome://tracing.

A trace has one process per HDP rank and one thread per track. That of a real step has a thread for each stage of what
was measured (one for every tensor-parallel rank), and one for what the simulator predicted for the same plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bytescale.common.atomic import whole_file
from bytescale.simulator.result import SimulatedStep

MICRO = 1e6  # the format counts in microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that a rank did without a break. Times in seconds."""

    name: str
    category: str
    start: float
    seconds: float
    about: dict[str, Any] = field(default_factory=dict)
    """What a click on it shows."""

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """A row of a trace: what one stage of one rank did over time."""

    rank: int
    name: str
    spans: list[Span]
    kind: str = ""
    """``measured`` or ``predicted``, where a trace has both."""


def save_trace(tracks: list[Track], path: Path, about: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Write tracks, by rank, by stage as a number, and by ``kind``. ``about``: the step as a whole.

    All times are shifted, so that none is below 0: some viewers do not show these. The file is replaced at once.
    """
    shift = max(0.0, -min((span.start for track in tracks for span in track.spans), default=0.0))

    def place(track: Track) -> tuple[int, int, str, str]:
        stage, _, rest = track.name.partition(", ")
        return track.rank, int(stage.removeprefix("stage ")), track.kind, rest

    content = {
        "traceEvents": entries_of(sorted(tracks, key=place), shift_seconds=shift),
        "displayTimeUnit": "ms",
        "otherData": {**about, "shift_seconds": shift},
    }
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(content), encoding="utf-8")


def spread_evenly(num_ranks: int, max_ranks: int) -> list[int]:
    """All ranks, or ``max_ranks`` of them with equal distances between them."""
    return np.unique(np.linspace(0, num_ranks - 1, min(max_ranks, num_ranks)).astype(int)).tolist()


def simulated_tracks(step: SimulatedStep, rank: int, kind: str = "") -> list[Track]:
    """A rank in a simulated step, one track per stage. At time 0 the step's first micro-batch or encoder begins."""
    events, timeline = step.events, step.timeline
    micro_batches = np.flatnonzero(events.micro_batch_ranks == rank)
    tracks = []
    for stage in range(step.num_stages):
        spans = [span for number in micro_batches.tolist() for span in _tasks(step, number, stage)]
        sync, start = float(step.sync_seconds[rank, stage]), float(timeline.end[:, stage].max())
        if step.encoders:
            (before, behind), text_end = (float(own[rank]) for own in step.encoders), float(timeline.end.max())
            encode = Span(name="encode", category="encode", start=0.0, seconds=before)
            backward = replace(encode, name="encode: backward", start=text_end, seconds=behind)
            spans = [encode, *spans, backward] if stage == 0 else spans
            start = text_end + float(step.encoders[1].max())
        if sync > 0:
            spans.append(Span(name="gradient sync", category="sync", start=start, seconds=sync))
        tracks.append(Track(rank=rank, name=f"stage {stage}", spans=spans, kind=kind))
    return tracks


def entries_of(tracks: list[Track], *, shift_seconds: float = 0.0) -> list[dict[str, Any]]:
    """The tracks in Chrome's trace event format. A track's thread is its place among the tracks of its rank.

    ``shift_seconds`` is added to all times.
    """
    entries: list[dict[str, Any]] = []
    num_tracks: dict[int, int] = {}
    for track in tracks:
        place = {"pid": track.rank, "tid": num_tracks.get(track.rank, 0)}
        if place["tid"] == 0:
            entries.append(
                {"name": "process_name", "ph": "M", "pid": track.rank, "args": {"name": f"rank {track.rank}"}}
            )
        num_tracks[track.rank] = place["tid"] + 1
        about = {"name": f"{track.name}, {track.kind}".removesuffix(", "), "track": track.name, "kind": track.kind}
        entries.append({"name": "thread_name", "ph": "M", **place, "args": about})
        for span in track.spans:
            times = {"ts": (span.start + shift_seconds) * MICRO, "dur": span.seconds * MICRO}
            entries.append({"name": span.name, "cat": span.category, "ph": "X", **place, **times, "args": span.about})
    return entries


def task_name(direction: str, degree: int) -> str:
    """What a forward or a backward is called."""
    return f"{direction}, " + (f"shared by {degree}" if degree > 1 else "local")


def _tasks(step: SimulatedStep, micro_batch: int, stage: int) -> list[Span]:
    loads, timeline = step.events.loads, step.timeline
    event = int(step.events.micro_batch_events[micro_batch])
    degree = int(loads.degree[micro_batch])
    about = {
        "ranks": degree,
        "tokens": int(loads.tokens[micro_batch]),
        "shared tokens of the group": int(loads.shared_tokens[micro_batch]),
        "offload ratio": round(float(loads.offload_ratio[micro_batch]), 3),
    }
    spans = []
    for direction, word in enumerate(("forward", "backward")):
        start, end = (float(times[event, stage, direction]) for times in (timeline.start, timeline.end))
        name = task_name(word, degree)
        spans.append(Span(name=name, category=word, start=start, seconds=end - start, about=about))
    return spans
