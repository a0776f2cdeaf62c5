"""Traces of real steps: what is in them, that they change nothing, and what a run says of steps that never come."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bytescale.common.errors import ConfigError
from bytescale.config.validate import validate
from bytescale.plan.io import load_plan
from bytescale.simulator.trace import MICRO, Span, Track
from bytescale.train.run_folder import RunFolder
from tests.train.runs import losses, metrics, on_ranks, run, small_run, with_trainer, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


class StepTrace(NamedTuple):
    about: dict[str, Any]
    tracks: list[Track]


def load_step_trace(path: Path) -> StepTrace:
    """What ``save_trace`` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    about = dict(content["otherData"])
    shift = float(about.pop("shift_seconds"))
    return StepTrace(about=about, tracks=_tracks(content["traceEvents"], shift))


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


def check_nesting(track: Track) -> None:
    """Spans of a track follow each other or lie inside each other: one rank does one thing at a time."""
    open_ends: list[float] = []
    for span in sorted(track.spans, key=lambda span: (span.start, -span.seconds)):
        while open_ends and open_ends[-1] <= span.start + 1e-9:
            open_ends.pop()
        assert not open_ends or span.end <= open_ends[-1] + 1e-9, span
        open_ends.append(span.end)


def of_kind(trace: StepTrace, kind: str) -> list[Track]:
    return [track for track in trace.tracks if track.kind == kind]


def check_against_plan(trace: StepTrace, folder: RunFolder) -> None:
    """The forwards and backwards of the trace are those of the plan that the step ran."""
    plan = load_plan(folder.plan(trace.about["step"]))
    for tracks in (of_kind(trace, "measured"), of_kind(trace, "predicted")):
        assert [track.rank for track in tracks] == list(range(plan.num_ranks))
        for track in tracks:
            for direction in ("forward", "backward"):
                tasks = [span for span in track.spans if span.category == direction]
                assert len(tasks) == len(plan.micro_batches_of(track.rank))
    tokens = [
        span.about["tokens"]
        for track in of_kind(trace, "measured")
        for span in track.spans
        if span.category == "forward"
    ]
    assert sum(tokens) == plan.num_tokens


def test_a_traced_run_of_two_ranks_has_the_same_losses_and_every_part_of_the_step(corpus: Path, tmp_path: Path) -> None:
    plain = on_ranks(small_run(corpus, tmp_path / "plain", steps=4), 2, capacity_tokens=128)
    run(plain)
    run(with_trainer(plain, run_dir=str(tmp_path / "traced"), trace_steps=(2, 4)))
    assert losses(tmp_path / "traced") == losses(tmp_path / "plain")

    folder = RunFolder(tmp_path / "traced")
    assert sorted(path.name for path in folder.traces.iterdir()) == ["step-000002.json", "step-000004.json"]
    trace = load_step_trace(folder.trace(2))
    line = metrics(tmp_path / "traced")[1]
    check_against_plan(trace, folder)
    assert trace.about["step"] == 2
    assert trace.about["predicted_seconds"] > 0
    assert trace.about["measured_seconds"] == line["step_seconds"]
    for track in of_kind(trace, "measured"):
        check_nesting(track)
        categories = [span.category for span in track.spans]
        assert {"data", "agree", "forward", "backward", "wait", "reduction", "report", "update"} == set(categories)
        assert [categories.count(part) for part in ("data", "agree", "reduction", "update")] == [1, 1, 1, 1]
        agree = next(span for span in track.spans if span.category == "agree")
        assert agree.end == pytest.approx(0.0, abs=1e-9)
    first = of_kind(trace, "measured")[0].spans  # the first rank's time is that of metrics.jsonl
    seconds = max(span.end for span in first) - min(span.start for span in first)
    assert 0 < line["step_seconds"] - seconds < 0.1 * line["step_seconds"] + 0.01
    shared = any(int(degree) > 1 for degree in line["group_sizes"])
    waits = {span.name for track in of_kind(trace, "measured") for span in track.spans if span.category == "wait"}
    assert ("wait: ring" in waits) == shared
    assert {"wait: all ranks", "wait: gradients, parameters"} <= waits


def test_metrics_split_a_step_into_parts_that_fit_into_it(corpus: Path, tmp_path: Path) -> None:
    run(on_ranks(small_run(corpus, tmp_path / "run", steps=3), 2, capacity_tokens=128))
    for line in metrics(tmp_path / "run"):
        assert line["waiting_seconds"] >= 0
        assert line["sync_seconds"] > 0
        parts = line["waiting_seconds"] + line["sync_seconds"] + (1 - line["waiting_share"]) * line["step_seconds"]
        assert parts <= line["step_seconds"] * (1 + 1e-9)


@pytest.mark.exhaustive
def test_a_pipeline_has_one_track_a_stage(corpus: Path, tmp_path: Path) -> None:
    config = on_ranks(small_run(corpus, tmp_path / "run", steps=1, trace_steps=(1,)), 4, capacity_tokens=128)
    run(replace(config, parallel=replace(config.parallel, pp=2)))
    trace = load_step_trace(RunFolder(tmp_path / "run").trace(1))
    places = [(rank, f"stage {stage}") for rank in (0, 1) for stage in (0, 1)]
    assert [(track.rank, track.name) for track in of_kind(trace, "measured")] == places
    assert [(track.rank, track.name) for track in of_kind(trace, "predicted")] == places
    for track in of_kind(trace, "measured"):
        check_nesting(track)
    assert any(span.name == "wait: stages" for track in of_kind(trace, "measured") for span in track.spans)


def test_tensor_parallel_ranks_have_a_track_each(corpus: Path, tmp_path: Path) -> None:
    config = on_ranks(small_run(corpus, tmp_path / "run", steps=1, trace_steps=(1,)), 2)
    run(replace(config, parallel=replace(config.parallel, tp=2)))
    trace = load_step_trace(RunFolder(tmp_path / "run").trace(1))
    assert [(track.rank, track.name) for track in of_kind(trace, "measured")] == [
        (0, "stage 0, tp 0"),
        (0, "stage 0, tp 1"),
    ]
    assert [(track.rank, track.name) for track in of_kind(trace, "predicted")] == [(0, "stage 0")]
    assert any(span.name == "wait: tensor parallel" for track in of_kind(trace, "measured") for span in track.spans)


@pytest.mark.parametrize("step", [0, 9])
def test_a_trace_of_a_step_that_the_run_has_not_is_refused(corpus: Path, tmp_path: Path, step: int) -> None:
    config = small_run(corpus, tmp_path / "run", steps=8, trace_steps=(2, step))
    with pytest.raises(ConfigError, match=rf"names step {step}, but the run has steps 1 to 8") as error:
        validate(config)
    assert "name steps from 1 to 8" in str(error.value)


def test_a_resumed_run_says_which_traces_it_cannot_take(corpus: Path, tmp_path: Path) -> None:
    config = small_run(corpus, tmp_path / "run", steps=3, trace_steps=(3,))
    run(config)
    run(with_trainer(config, steps=5, resume=True, trace_steps=(1, 3, 5)))
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "none of step 1, which log.trace_steps names: the run goes on from step 4" in log
    assert "none of step 3" not in log  # its trace is there
    assert RunFolder(tmp_path / "run").trace(5).exists()
    run(with_trainer(config, steps=5, resume=True, trace_steps=(2,)))
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "none of step 2, which log.trace_steps names: the run ended before it" in log
