"""The page of a report: one HTML file with everything inside, which loads nothing and needs no script.

Each section takes all runs and returns HTML; it is empty where no run has anything to show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader

from bytescale import __version__
from bytescale.common.units import format_bytes, format_count, format_seconds, format_si
from bytescale.report.advice import advice_for
from bytescale.report.charts import Series, grouped_columns, line_chart, stacked_columns
from bytescale.report.parts import PARTS, forecasts, mean_parts, step_parts, typical, warm
from bytescale.report.runs import Batches, RunRecord

_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
HTML: Any = _TEMPLATES.get_template("pieces.html").module
"""The macros of pieces.html, as functions whose results Jinja does not escape again."""
LAST = 5  # steps over which the last loss is averaged: one batch's loss depends on its documents
PART_NAMES = {
    "compute": "compute",
    "encode": "encoding pictures",
    "waiting": "waiting for other ranks",
    "sync": "reducing gradients",
    "data": "waiting for data",
    "other": "update and the rest",
}


def report_page(runs: Sequence[RunRecord]) -> str:
    """The whole report as HTML."""
    return _TEMPLATES.get_template("page.html").render(
        version=__version__,
        when=f"{datetime.now():%Y-%m-%d %H:%M}",
        title=", ".join(run.name for run in runs),
        sections=[(name, heading, make(runs)) for name, heading, make in SECTIONS],
    )


def overview_section(runs: Sequence[RunRecord]) -> str:
    rows: dict[str, Callable[[RunRecord], str]] = {
        "steps": lambda run: f"{run.step_numbers[-1] if run.steps else 0} of {run.settings['trainer.steps']}",
        "ranks": _ranks,
        "planner": lambda run: str(run.settings["planner.name"]),
        f"loss (mean of the last {LAST})": _last_loss,
        "tokens/s (median)": lambda run: _typical(run, "tokens_per_second", format_count),
        "FLOP/s (median)": lambda run: _typical(run, "model_flops_per_second", format_si),
        "MFU (median)": lambda run: _typical(run, "mfu", "{:.1%}".format),
        "step (median)": lambda run: _typical(run, "step_seconds", format_seconds),
        "peak memory of a rank": _peak,
        "sent by rings, a step": lambda run: _typical(run, "attention_bytes_sent", format_bytes),
    }
    found = [[name, *map(figure, runs)] for name, figure in rows.items()]
    shown = [row for row in found if set(row[1:]) != {"-"}]
    return HTML.states(runs) + HTML.table(["", *[run.name for run in runs]], shown, css="figures")


def help_section(runs: Sequence[RunRecord]) -> str:
    blocks = []
    for run in runs:
        content = HTML.help(advice_for(run))
        if not run.steps:
            content = HTML.note("No step has been finished yet, so there is nothing to say.")
        elif not content:
            content = HTML.note("Nothing stands out: no part of a step costs more than a few per cent.")
        blocks.append((run.name, content))
    return HTML.per_run(blocks)


def loss_section(runs: Sequence[RunRecord]) -> str:
    """The loss of all runs on one pair of axes, with that on evaluation data, and the last evaluations by length."""
    evaluated = [
        Series(
            f"{run.name}, evaluation" if len(runs) > 1 else "evaluation",
            f"s{place % 6} dashed",
            [float(line["step"]) for line in run.evaluations],
            [float(line["loss"]) for line in run.evaluations],
        )
        for place, run in enumerate(runs)
        if run.evaluations
    ]
    chart = line_chart([*_series(runs, "loss"), *evaluated], label="{:.3g}".format)
    return HTML.plot(chart) + HTML.per_run([(run.name, _by_length(run)) for run in runs])


def throughput_section(runs: Sequence[RunRecord]) -> str:
    return HTML.plot(line_chart(_series(runs, "tokens_per_second"), label=format_count, from_zero=True))


def time_section(runs: Sequence[RunRecord]) -> str:
    highest = max((float(line["step_seconds"]) for run in runs for line in run.steps), default=0.0)
    blocks = []
    for run in runs:
        if not run.steps:
            continue
        steps, means = [step_parts(line) for line in run.steps], mean_parts(run)
        total, shown = sum(means.values()), [part for part in PARTS if part != "encode" or means[part]]
        texts = {part: f"{PART_NAMES[part]} {format_seconds(means[part])}, {means[part] / total:.0%}" for part in shown}
        series = [Series(part, f"p-{part}", run.step_numbers, [parts[part] for parts in steps]) for part in shown]
        chart = stacked_columns(series, highest=highest, label=format_seconds)
        keys = [(f"p-{part}", text) for part, text in texts.items()]
        blocks.append((run.name, HTML.plot(chart._replace(keys=keys))))
    text = HTML.note(
        "Means over ranks; those of the whole run leave out the first steps. Waiting is inside forward and backward. "
        "Reducing begins after the last backward of a rank and includes the wait for ranks that compute longer."
    )
    return HTML.per_run(blocks) + text if blocks else ""


def batches_section(runs: Sequence[RunRecord]) -> str:
    return HTML.per_run([(run.name, _lengths(run.batches) + _degrees(run.batches)) for run in runs if run.batches])


def _lengths(found: Batches) -> str:
    bins = np.floor(np.log2(np.maximum(found.lengths, 1))).astype(int)
    low, high = int(bins.min()), int(bins.max())
    counts, tokens = np.bincount(bins - low), np.bincount(bins - low, weights=found.lengths)
    names = [f"{format_count(2**power)}-{format_count(2 ** (power + 1) - 1)}" for power in range(low, high + 1)]
    if found.lengths.max() == 2**high:
        names[-1] = format_count(2**high)
    series = (
        ("p-compute", "share of sequences", (counts / counts.sum()).tolist()),
        ("p-sync", "share of tokens", (tokens / tokens.sum()).tolist()),
    )
    return HTML.plot(grouped_columns(names, series, "tokens of a sequence"))


def _degrees(found: Batches) -> str:
    rows = []
    for degree in np.unique(found.group_degrees).tolist():
        own, sequences = found.group_degrees == degree, found.degrees == degree
        share = found.group_tokens[own].sum() / found.group_tokens.sum()
        rows.append([str(degree), f"{own.sum() / found.num_plans:.1f}", f"{sequences.sum()}", f"{share:.1%}"])
    return HTML.table(["ranks that share", "groups a step", "sequences", "share of tokens"], rows) + HTML.note(
        f"Of {len(found.lengths)} sequences in the plans of {found.num_plans} steps; the longest has "
        f"{format_count(int(found.lengths.max()))} tokens."
    )


def memory_section(runs: Sequence[RunRecord]) -> str:
    chart = HTML.plot(line_chart(_series(runs, "memory_bytes"), label=format_bytes, from_zero=True))
    about = HTML.note("The largest of any rank so far. On a GPU what tensors occupy, on a CPU the whole process.")
    expected = [(run.name, HTML.note(*[line for line in run.log if line.startswith("memory  ")])) for run in runs]
    return chart + about + HTML.per_run(expected) if chart else ""


def calibration_section(runs: Sequence[RunRecord]) -> str:
    blocks = []
    for run in runs:
        found = forecasts(run)
        if not found:
            continue
        steps, predicted, measured = (list(column) for column in zip(*found, strict=True))
        lines = [
            Series("measured", "s-measured", steps, measured),
            Series("predicted", "s-predicted", steps, predicted),
        ]
        error = median(abs(one.error) for one in warm(found))
        text = HTML.note(f"Median error of {len(warm(found))} steps: {error:.0%} of the measured time.")
        blocks.append((run.name, HTML.plot(line_chart(lines, label=format_seconds, from_zero=True)) + text))
    return HTML.per_run(blocks)


def settings_section(runs: Sequence[RunRecord]) -> str:
    """The settings in which runs differ, and all of them on a click."""
    names = sorted({name for run in runs for name in run.settings})
    rows = [[name, *[_setting(run.settings.get(name)) for run in runs]] for name in names]
    head = ["", *[run.name for run in runs]]
    different = [row for row in rows if len(set(row[1:])) > 1 and row[0] != "trainer.run_dir"]
    first = ""
    if len(runs) > 1:
        first = HTML.table(head, different) if different else HTML.note("All settings are the same.")
    return first + HTML.details("All settings", HTML.table(head, rows))


def _by_length(run: RunRecord) -> str:
    last = run.evaluations[-1] if run.evaluations else {}
    rows = [
        [
            "longer" if bucket["longest_tokens"] is None else f"up to {format_count(bucket['longest_tokens'])}",
            f"{bucket['loss']:.4f}",
            f"{bucket['perplexity']:.2f}",
            format_count(bucket["num_targets"]),
        ]
        for bucket in last.get("buckets", [])
    ]
    head = ["tokens of a sequence", "loss", "perplexity", "targets"]
    return HTML.details(f"Evaluation after step {last['step']}, by length", HTML.table(head, rows)) if rows else ""


def _series(runs: Sequence[RunRecord], name: str) -> list[Series]:
    return [Series(run.name, f"s{place % 6}", run.step_numbers, run.column(name)) for place, run in enumerate(runs)]


def _ranks(run: RunRecord) -> str:
    degrees = {name: run.settings[f"parallel.{name}"] for name in ("tp", "pp")}
    read = run.steps[-1].get("data_bytes_read") if run.steps else None
    there = len(read) if isinstance(read, list) else 0
    return f"{there or run.settings['parallel.ranks']}" + "".join(f", {n} {d}" for n, d in degrees.items() if d > 1)


def _last_loss(run: RunRecord) -> str:
    losses = [loss for loss in run.column("loss") if loss is not None][-LAST:]
    return f"{mean(losses):.4f}" if losses else "-"


def _peak(run: RunRecord) -> str:
    values = [value for value in run.column("memory_bytes") if value is not None]
    return format_bytes(max(values)) if values else "-"


def _typical(run: RunRecord, name: str, text: Callable[[float], str]) -> str:
    value = typical(run, name)
    return "-" if value is None else text(value)


def _setting(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "unset" if value in (None, "", {}) else str(value)


SECTIONS = (
    ("overview", "Overview", overview_section),
    ("help", "What would help", help_section),
    ("loss", "Loss", loss_section),
    ("throughput", "Throughput", throughput_section),
    ("time", "Where the time goes", time_section),
    ("batches", "Lengths and degrees", batches_section),
    ("memory", "Memory", memory_section),
    ("calibration", "Predicted and measured", calibration_section),
    ("settings", "Settings", settings_section),
)
