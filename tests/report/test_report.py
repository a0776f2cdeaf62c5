"""What a report says: figures, advice, traces, and a file that is whole and loads nothing."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale.cli.main import main
from bytescale.report import read_runs, report_page
from bytescale.report.advice import advice_for
from bytescale.report.charts import Series, line_chart, ranks_over_time
from bytescale.report.parts import forecasts, rank_times, step_parts
from bytescale.report.runs import RunRecord, read_run
from bytescale.simulator.step_trace import load_step_trace, save_step_trace
from bytescale.train.reporting.evaluations import EvaluationMetrics
from bytescale.train.run_folder import RunFolder
from tests.report.folders import metrics_line, trace_of_two_ranks, write_run


def lines(count: int, **changes: Any) -> list[dict]:
    return [metrics_line(step, **changes) for step in range(1, count + 1)]


class Page(HTMLParser):
    """A page that was read: its text, and whether every tag is closed."""

    VOID = ("meta", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.links += [str(values[name]) for name in ("href", "src") if name in values]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass  # <path/>

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "title"):
            self.words.append(data)


def page_of(*runs: RunRecord) -> Page:
    page = Page(report_page(runs))
    assert page.open == []
    return page


def test_parts_of_a_step_add_up_to_it() -> None:
    parts = step_parts(metrics_line(1, data_wait_seconds=0.05))
    assert parts.seconds == pytest.approx({"compute": 1.5, "waiting": 0.3, "sync": 0.1, "data": 0.05, "other": 0.05})
    late = step_parts(metrics_line(1, data_wait_seconds=1.9))  # of the slowest rank: more than what is left
    assert sum(late.seconds.values()) == pytest.approx(2.0)
    assert late.seconds["other"] == 0.0


def test_lines_of_an_older_version_count_all_else_as_waiting() -> None:
    line = metrics_line(1, data_wait_seconds=0.1)
    del line["waiting_seconds"], line["sync_seconds"]
    seconds = step_parts(line).seconds
    assert seconds == pytest.approx({"compute": 1.5, "waiting": 0.4, "sync": 0.0, "data": 0.1, "other": 0.0})


def test_a_trace_survives_its_file_and_adds_up_rank_by_rank(tmp_path: Path) -> None:
    trace = trace_of_two_ranks(3, slowness=1.5)
    save_step_trace(trace, tmp_path / "trace.json")
    loaded = load_step_trace(tmp_path / "trace.json")
    assert loaded.metadata == trace.metadata
    for mine, theirs in zip(trace.measured + trace.predicted, loaded.measured + loaded.predicted, strict=True):
        assert (theirs.rank, theirs.name) == (mine.rank, mine.name)
        for span, other in zip(mine.spans, theirs.spans, strict=True):
            assert (other.name, other.category, other.about) == (span.name, span.category, span.about)
            assert (other.start, other.seconds) == pytest.approx((span.start, span.seconds), abs=1e-9)
    first, second = rank_times(loaded)
    assert (first.rank, first.compute, first.ring, first.other_waits) == (0, pytest.approx(2.75), 0.25, 0.0)
    assert second.compute == pytest.approx(4.25)
    assert (first.sync, first.data, first.update) == pytest.approx((0.5, 0.2, 0.2))
    assert first.predicted_compute == pytest.approx(1.5)


def test_ranks_over_time_shows_measured_and_predicted_tracks() -> None:
    html = ranks_over_time(trace_of_two_ranks(3))
    assert html.count('class="track measured"') == html.count('class="track predicted"') == 2
    assert "forward, shared by 2: 1 s, 1500 tokens" in html
    assert html.count("wait: ring: 250 ms") == 2
    assert "wait: gradients" not in html  # it is the reduction's


def test_tracks_are_sorted_by_the_number_of_their_stage(tmp_path: Path) -> None:
    trace = trace_of_two_ranks(3)
    tracks = [replace(trace.measured[0], name=f"stage {stage}") for stage in (10, 2, 0)]
    save_step_trace(replace(trace, measured=tracks, predicted=[]), tmp_path / "trace.json")
    names = [track.name for track in load_step_trace(tmp_path / "trace.json").measured]
    assert names == ["stage 0", "stage 2", "stage 10"]


def test_predictions_come_from_metrics_or_else_from_traces(tmp_path: Path) -> None:
    traced = read_run(write_run(tmp_path / "traced", lines(4), traced=trace_of_two_ranks(3)), "traced")
    (found,) = forecasts(traced)
    assert (found.step, found.predicted, found.measured) == (3, 1.5, 2.0)
    assert found.error == pytest.approx(0.25)
    some = lines(4, predicted_seconds=1.0, data_wait_seconds=0.4)
    told = forecasts(read_run(write_run(tmp_path / "told", some, traced=trace_of_two_ranks(3)), "told"))
    assert [(one.step, one.predicted, one.measured) for one in told] == [(step, 1.0, 2.0) for step in (1, 2, 3, 4)]


def figures(tmp_path: Path, changes: dict[str, Any], **run: Any) -> list[str]:
    path = write_run(tmp_path / f"run-{len(list(tmp_path.iterdir()))}", lines(10, **changes), steps=10, **run)
    return [one.figure for one in advice_for(read_run(path, "run"))]


QUIET = {"waiting_seconds": 0.02, "sync_seconds": 0.02, "waiting_share": 0.03}


def test_nothing_is_advised_where_nothing_stands_out(tmp_path: Path) -> None:
    assert figures(tmp_path, QUIET) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"waiting_seconds": 0.4, "waiting_share": 0.2}, "Ranks wait 20% of the time for each other"),
        ({"sync_seconds": 0.5, "waiting_share": 0.3}, "ranks spend 25% of the time"),
        ({"data_wait_seconds": 0.5, "waiting_share": 0.3}, "Steps wait 25% of their time for data."),
        ({"imbalance": 1.3}, "The slowest rank computes 30% longer"),
        ({"predicted_seconds": 0.5}, "was predicted to take 500 ms and took 2 s"),
    ],
)
def test_advice_names_what_costs_time_with_its_number(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    (figure,) = figures(tmp_path, {**QUIET, **changes})
    assert words in figure


def test_advice_on_slow_steps_and_slow_ranks(tmp_path: Path) -> None:
    some = lines(10, **QUIET)
    some[6] |= {"step_seconds": 8.0}
    run = read_run(write_run(tmp_path / "steps", some, steps=10), "run")
    (advice,) = advice_for(run)
    assert "1 of 8 steps took more than 1.5 times the median time a token (step 7)" in advice.figure
    assert "--log.trace-steps 7" in advice.remedy
    (figure,) = [one for one in figures(tmp_path, QUIET, traced=trace_of_two_ranks(3, slowness=2.0)) if "Rank" in one]
    assert figure.startswith("Rank 1 takes 1.35 times as long as the other ranks")


def test_advice_follows_the_settings(tmp_path: Path) -> None:
    path = write_run(tmp_path / "static", lines(5), planner="static")
    remedies = " ".join(one.remedy for one in advice_for(read_run(path, "run")))
    assert 'Use `planner.name = "adaptive"` instead of "static"' in remedies


def test_the_page_has_the_figures_and_loads_nothing(tmp_path: Path) -> None:
    log = "memory  56 MiB of 5.41 GiB at the peak <of> a full micro-batch\n"
    path = write_run(tmp_path / "a <run> & more", lines(4), traced=trace_of_two_ranks(3), log=log)
    page = page_of(*read_runs([path]))
    assert page.links == [f"#{name}" for name in page.ids if name != "overview"]
    assert {"help", "loss", "throughput", "time", "ranks", "batches", "memory", "calibration", "settings"} <= {
        *page.ids
    }
    for words in (
        "a <run> & more",
        "was killed after step 4 of 6",
        "4 of 6",
        "7.7500",  # the mean of the four losses
        "768 MiB",
        "Step 3: 3.9 s, predicted 1.5 s",
        "56 MiB of 5.41 GiB at the peak <of> a full micro-batch",
        "the longest has 2.93K tokens",
        "+25%",
    ):
        assert words in page.text, words
    html = report_page(read_runs([path]))
    assert not re.search(r"https?://|<script|@import|url\(", html)


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", lines(6))
    second = write_run(tmp_path / "second", lines(4, tokens_per_second=8192.0, loss=5.0), planner="static")
    page = page_of(*read_runs([first, second]))
    assert "second trains 2.00 times as many tokens a second as first." in page.text
    assert "At step 4 its loss is 5.0000, and 7.0000 in first." in page.text
    assert "planner.name adaptive static" in page.text
    assert "All settings" in page.text


def test_what_calibration_has_learned(tmp_path: Path) -> None:
    def calibrated(step: int, seconds: float, slow: float) -> str:
        cost = {"attention_seconds_per_pair": seconds, "token_seconds": 1e-6, "inter_node_bytes_per_second": math.inf}
        return json.dumps({"step": step, "cost": cost, "speeds": [1.0, slow]}) + "\n"

    few = [line | {"predicted_seconds": 2.0} for line in lines(6)]
    path = write_run(tmp_path / "run", few)
    told = [calibrated(1, 1e-9, 1.0), calibrated(2, 2e-9, 0.5), calibrated(3, 3e-9, 0.45), calibrated(4, 4e-9, 1.0)]
    RunFolder(path).calibration.write_text("".join(told) + '{"step": 5, "cost', encoding="utf-8")
    text = page_of(*read_runs([path])).text
    assert "attention, a million pairs 1 ms 4 ms" in text
    assert "Rank 1 had 0.45 to 0.50 of the middle rank's speed after 2 of 4 steps (2 to 3)." in text
    assert "last line of calibration.jsonl is cut off" in text
    RunFolder(path).calibration.write_text(told[0], encoding="utf-8")
    assert "Calibration has changed no cost in 1 steps" in page_of(*read_runs([path])).text


def test_evaluations_stand_beside_the_loss(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", lines(4))
    metrics = EvaluationMetrics.of(2, np.array([64, 256]), np.array([[30.0, 10.0, 10], [0.0, 0.0, 0], [8.0, 4.0, 4]]))
    RunFolder(path).evaluations.write_text(metrics.to_json() + "\n", encoding="utf-8")
    html = report_page(read_runs([path]))
    assert 'class="line s0 dashed"' in html
    assert "Evaluation after step 2, by length" in Page(html).text
    assert "up to 64 3.0000 20.09 10 longer 2.0000 7.39 4" in Page(html).text


def test_traces_that_are_missing_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", lines(4), traced=trace_of_two_ranks(3), trace_steps=(2, 3, 5))
    text = page_of(*read_runs([path])).text
    assert (
        "Step 5 will be traced if the run is continued so far. There is no trace of step 2; log.txt says why." in text
    )
    none = write_run(tmp_path / "none", lines(4))
    assert "No step was traced." in page_of(*read_runs([none])).text


def test_a_run_without_steps_has_a_page(tmp_path: Path) -> None:
    page = page_of(*read_runs([write_run(tmp_path / "run", [])]))
    assert "has not finished its first step" in page.text
    assert "there is nothing to say" in page.text
    assert "loss" not in page.ids
    assert page.links == [f"#{name}" for name in page.ids if name != "overview"]


def test_long_lines_are_thinned_and_gaps_are_left_out() -> None:
    xs = [float(x) for x in range(10_000)]
    html = line_chart([Series(name="loss", css="s0", xs=xs, ys=[None, *xs[1:]])], label=str)
    (path,) = re.findall(r'class="line s0" d="([^"]*)"', html)
    assert 300 <= path.count("L") + 1 <= 400
    assert line_chart([Series(name="loss", css="s0", xs=[1.0], ys=[None])], label=str) == ""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = write_run(tmp_path / "run", lines(3)), tmp_path / "report.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "run: This run was killed after step 3 of 6" in printed
    assert f"wrote {out}" in printed
    assert Page(out.read_text(encoding="utf-8")).open == []
    assert main(["report", str(tmp_path / "absent"), "--out", str(out)]) == 2
    assert "not the folder of a run" in capsys.readouterr().err
    assert main(["report", str(run), "--out", str(tmp_path / "no" / "report.html")]) == 2
    assert f"The folder {tmp_path / 'no'} of --out" in capsys.readouterr().err
