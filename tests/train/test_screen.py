"""The console of a run: rows of at most 110 columns, remarks about rare events, and a bar on terminals only."""

from __future__ import annotations

import os
import pty
import re
import select
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from bytescale.train.reporting import screen
from bytescale.train.reporting.metrics import StepMetrics
from bytescale.train.reporting.screen import LiveScreen, console_of, screen_of_stdout
from bytescale.train.reporting.step_row import remarks, step_header, step_row

STEP = StepMetrics(
    step=12,
    loss=5.45951,
    batch_loss=0.0,
    grad_norm=0.364,
    learning_rate=1e-2,
    num_tokens=12000,
    num_sequences=9,
    step_seconds=1.5,
    tokens_per_second=8284.0,
    model_flops_per_second=28.13e9,
    mfu=None,
    memory_bytes=510 * 1024**2,
    imbalance=1.02,
    waiting_share=0.08,
    waiting_seconds=0.12,
    sync_seconds=0.05,
    data_wait_seconds=0.014,
    planning_seconds=0.05,
    data_bytes_read=[9000] * 4,
    data_steps_ready=2,
    data_restarts=0,
    attention_bytes_sent=1000,
    group_sizes={"4": 2, "3": 1, "2": 1, "1": 3},
)
WORST = replace(
    STEP,
    step=1000000,
    loss=10.12345,
    grad_norm=123456.78,
    tokens_per_second=1023.4 * 1024**2,
    model_flops_per_second=999.6e15,
    memory_bytes=1023 * 1024**3,
    imbalance=511.99,
    waiting_share=1.0,
    group_sizes={str(degree): 1000 + degree for degree in range(512, 0, -7)},
)


def test_a_row_as_the_readme_shows_it() -> None:
    assert step_header(80, mfu=False) + "\n" + step_row(STEP, 80) == (
        "step     loss grad norm     lr  tok/s FLOP/s   memory imbalance waiting groups\n"
        "12/80  5.4595      0.36 1.0e-2  8.09K  28.1G  510 MiB      1.02      8% 4x2 3x1 2x1 1x3"
    )


def test_columns_stand_below_their_names() -> None:
    header, row = step_header(80, mfu=False), step_row(STEP, 80)
    for name, value in (("loss", "5.4595"), ("FLOP/s", "28.1G"), ("memory", "510 MiB"), ("waiting", "8%")):
        assert header.index(name) + len(name) == row.index(value) + len(value)
    assert header.index("groups") == row.index("4x2")


@pytest.mark.parametrize("width", [80, 110])
@pytest.mark.parametrize("mfu", [None, 0.486])
def test_no_row_is_wider_than_its_screen(width: int, mfu: float | None) -> None:
    assert len(step_row(replace(STEP, mfu=mfu), 80, width)) <= width
    worst = step_row(replace(WORST, mfu=mfu), 1000000)
    assert len(worst) <= 110
    assert "512x1512" in worst
    assert worst.endswith("...")  # the groups that are cut are in metrics.jsonl


def test_mfu_is_shown_only_where_the_peak_is_known() -> None:
    known = replace(STEP, mfu=0.486)
    assert "MFU" in step_header(80, mfu=True)
    assert "48.6%" in step_row(known, 80)
    assert "MFU" not in step_header(80, mfu=False)
    assert "%" not in step_row(STEP, 80).replace("8%", "")


def test_what_is_rare_is_told_when_it_happens() -> None:
    assert remarks(STEP, None) == []
    waited = replace(STEP, data_wait_seconds=0.3)
    assert remarks(waited, STEP) == ["        step 12 waited 300 ms for data, 20% of its time; its plan took 50 ms"]
    assert remarks(waited, None) == []
    slow = replace(STEP, predicted_seconds=0.5)
    assert remarks(slow, STEP) == ["        step 12 took 1.5 s, 3.0 times the 500 ms that were predicted"]
    assert remarks(replace(STEP, predicted_seconds=10.0), STEP) == []
    restarted = replace(STEP, data_restarts=2)
    assert re.search(r"restarted \(restarts so far: 2\)", remarks(restarted, STEP)[0])
    assert remarks(restarted, restarted) == []


def test_lines_are_plain_in_a_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    shown = screen_of_stdout()
    assert not isinstance(shown, LiveScreen)
    shown.progress(1, 2)
    shown.line("a line with [brackets]")
    shown.close()
    assert capfd.readouterr().out == "a line with [brackets]\n"


@pytest.mark.parametrize(
    ("ci", "term", "is_live"), [("", "xterm", True), ("true", "xterm", False), ("", "dumb", False)]
)
def test_a_terminal_has_a_live_bar_except_under_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, term: str, is_live: bool
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("TERM", term)
    with terminal() as (file, _):
        monkeypatch.setattr(screen.sys, "stdout", file)
        assert isinstance(screen_of_stdout(), LiveScreen) == is_live


def test_the_bar_shows_the_time_left_and_goes_away() -> None:
    with terminal() as (file, output):
        shown = LiveScreen(console_of(file))
        shown.line("plan    [1, 2]")
        for step in range(3):
            shown.progress(step, 5)
            shown.line(f"row {step}")
        shown.close()
        shown.line("done")
        text = output()
    assert "2/5" in text
    assert re.search(r"\d:\d\d:\d\d", text)
    assert "plan    [1, 2]" in text
    assert text.index("row 2") < text.rindex("done")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


def test_lines_are_shown_as_they_are() -> None:
    with terminal() as (file, output):
        console_of(file).print("[data] 12 of [1, 2] :smile: /a/b")
        assert output() == "[data] 12 of [1, 2] :smile: /a/b\r\n"


def test_long_lines_are_broken_between_words_and_commands_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    command = "          bytescale train --resume runs/some-name --trainer.steps 90"
    with terminal() as (file, output):
        shown = LiveScreen(console_of(file))
        shown.line("plan    5 sequences of 13K tokens (longest 4K) on 4 ranks")
        shown.line(command)
        plan = "plan    5 sequences of 13K tokens\r\n        (longest 4K) on 4 ranks\r\n"
        assert output() == plan + command + "\r\n"


@contextmanager
def terminal() -> Iterator[tuple]:
    """A terminal's file to write to, and a function that tells what arrived there."""
    ours, theirs = pty.openpty()
    file = os.fdopen(theirs, "w", encoding="utf-8")

    def output() -> str:
        file.flush()
        content = b""
        while select.select([ours], [], [], 0)[0]:  # a terminal hands out a few KiB at a time
            content += os.read(ours, 1 << 16)
        return content.decode()

    try:
        yield file, output
    finally:
        file.close()
        os.close(ours)
