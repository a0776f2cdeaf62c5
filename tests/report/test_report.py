"""What a report says: figures, advice, and a file that is whole and loads nothing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale.cli.main import main
from bytescale.report import read_runs, report_page
from bytescale.report.advice import advice_for
from bytescale.report.charts import Series, line_chart
from bytescale.report.parts import forecasts, step_parts
from bytescale.report.runs import RunRecord, read_run
from bytescale.train.reporting.metrics import EvaluationMetrics
from bytescale.train.run_folder import RunFolder
from tests.report.folders import metrics_line, write_run


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
    assert parts == pytest.approx(
        {"compute": 1.5, "encode": 0.0, "waiting": 0.3, "sync": 0.1, "data": 0.05, "other": 0.05}
    )
    late = step_parts(metrics_line(1, data_wait_seconds=1.9))  # of the slowest rank: more than what is left
    assert sum(late.values()) == pytest.approx(2.0)
    assert late["other"] == 0.0


def test_pictures_have_a_part_of_their_own(tmp_path: Path) -> None:
    """With a colour; text has none of it, and a line that was written before has no such column."""
    seen = lines(6, encode_seconds=0.4, waiting_share=0.5)
    assert step_parts(seen[0])["encode"] == pytest.approx(0.4)
    page, text = (
        report_page([read_run(write_run(tmp_path / name, own), name)])
        for name, own in (("seen", seen), ("text", lines(6)))
    )
    assert 'class="p-encode"' in page
    assert "encoding pictures 400 ms, 20%" in page
    assert "encoding pictures" not in text


def test_predictions_come_from_metrics(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "told", [metrics_line(1), *lines(3, predicted_seconds=1.5)[1:]]), "told")
    assert [(one.step, one.predicted, one.measured) for one in forecasts(run)] == [(2, 1.5, 2.0), (3, 1.5, 2.0)]
    assert forecasts(run)[0].error == pytest.approx(0.25)


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
    assert "1 of 8 steps took more than 1.5 times the median time a token (7)" in advice.figure
    slow = write_run(tmp_path / "slow", lines(10, **QUIET), steps=10)
    told = [json.dumps({"step": step, "speeds": [1.0, 0.45]}) + "\n" for step in (9, 10)]
    RunFolder(slow).calibration.write_text("".join(told) + '{"step": 11, "cost', encoding="utf-8")
    run = read_run(slow, "run")
    assert [one.figure for one in advice_for(run)] == ["Rank 1 has 0.45 of the middle rank's speed, after step 10."]
    assert "last line of calibration.jsonl is cut off" in run.notes[0]


def test_advice_follows_the_settings(tmp_path: Path) -> None:
    path = write_run(tmp_path / "static", lines(5), planner="static")
    remedies = " ".join(one.remedy for one in advice_for(read_run(path, "run")))
    assert 'Use `planner.name = "adaptive"` instead of "static"' in remedies


def test_the_page_has_the_figures_and_loads_nothing(tmp_path: Path) -> None:
    log = "memory  56 MiB of 5.41 GiB at the peak <of> a full micro-batch\n"
    some = lines(4, predicted_seconds=1.5)
    path = write_run(tmp_path / "a <run> & more", some, log=log)
    page = page_of(*read_runs([path]))
    assert page.links == [f"#{name}" for name in page.ids if name != "overview"]
    assert {"help", "loss", "throughput", "time", "batches", "memory", "calibration", "settings"} <= {*page.ids}
    for words in (
        "a <run> & more",
        "was killed after step 4 of 6",
        "4 of 6",
        "7.7500",  # the mean of the four losses
        "768 MiB",
        "56 MiB of 5.41 GiB at the peak <of> a full micro-batch",
        "the longest has 2.93K tokens",
        "compute 1.5 s, 75%",
        "Median error of 2 steps: 25%",
    ):
        assert words in page.text, words
    html = report_page(read_runs([path]))
    assert not re.search(r"https?://|<script|@import|url\(", html)


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", lines(6))
    second = write_run(tmp_path / "second", lines(4, tokens_per_second=8192.0, loss=5.0), planner="static")
    page = page_of(*read_runs([first, second]))
    assert "tokens/s (median) 4K 8K" in page.text
    assert "planner.name adaptive static" in page.text
    assert "All settings" in page.text


def test_evaluations_stand_beside_the_loss(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", lines(4))
    metrics = EvaluationMetrics.of(2, np.array([64, 256]), np.array([[30.0, 10.0, 10], [0.0, 0.0, 0], [8.0, 4.0, 4]]))
    RunFolder(path).evaluations.write_text(metrics.to_json() + "\n", encoding="utf-8")
    html = report_page(read_runs([path]))
    assert 'class="line s0 dashed"' in html
    assert "Evaluation after step 2, by length" in Page(html).text
    assert "up to 64 3.0000 20.09 10 longer 2.0000 7.39 4" in Page(html).text


def test_a_run_without_steps_has_a_page(tmp_path: Path) -> None:
    page = page_of(*read_runs([write_run(tmp_path / "run", [])]))
    assert "has not finished its first step" in page.text
    assert "there is nothing to say" in page.text
    assert "loss" not in page.ids
    assert page.links == [f"#{name}" for name in page.ids if name != "overview"]


def test_long_lines_are_thinned_and_gaps_are_left_out() -> None:
    xs = [float(x) for x in range(10_000)]
    plot = line_chart([Series("loss", "s0", xs, [None, *xs[1:]])], label=str)
    assert plot is not None
    (line,) = plot.marks
    assert 300 <= line.path.count("L") + 1 <= 400
    assert line_chart([Series("loss", "s0", [1.0], [None])], label=str) is None


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
