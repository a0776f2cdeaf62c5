"""Puts the report together: one HTML file with everything inside. It loads nothing and needs no script."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib import resources

from bytescale import __version__
from bytescale.report.advice import advice_for
from bytescale.report.html import note, per_run, prose, section
from bytescale.report.runs import RunRecord
from bytescale.report.sections import (
    batches_section,
    calibration_section,
    loss_section,
    memory_section,
    overview_section,
    settings_section,
    throughput_section,
    time_section,
)

SECTIONS = (
    ("loss", "Loss", loss_section),
    ("throughput", "Throughput", throughput_section),
    ("time", "Where the time goes", time_section),
    ("batches", "Lengths and degrees", batches_section),
    ("memory", "Memory", memory_section),
    ("calibration", "Predicted and measured", calibration_section),
    ("settings", "Settings", settings_section),
)


def report_page(runs: Sequence[RunRecord], *, now: datetime | None = None) -> str:
    """The whole report as HTML. ``now``: when it was made; None: now."""
    when = f"{now or datetime.now():%Y-%m-%d %H:%M}"
    title = ", ".join(run.name for run in runs)
    made_of = [("help", "What would help", _help(runs))]
    made_of += [(name, heading, make(runs)) for name, heading, make in SECTIONS]
    parts = [section("overview", "Overview", _states(runs) + overview_section(runs))]
    parts += [section(name, heading, content) for name, heading, content in made_of]
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, content in made_of if content)
    style = resources.files("bytescale.report").joinpath("style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} - bytescale report</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header><p>bytescale {__version__} report, {when}</p><h1>{escape(title)}</h1><nav>{links}</nav></header>\n"
        f"<main>\n{''.join(parts)}</main>\n</body>\n</html>\n"
    )


def _states(runs: Sequence[RunRecord]) -> str:
    lines = []
    for place, run in enumerate(runs):
        name = f'<b><i class="r{place % 6}"></i>{escape(run.name)}</b>'
        notes = "".join(f"<br>{prose(text)}" for text in run.notes)
        lines.append(f'<p class="state {run.state}">{name}{prose(run.state_text)}{notes}</p>')
    return "".join(lines)


def _help(runs: Sequence[RunRecord]) -> str:
    blocks = []
    for run in runs:
        found = advice_for(run)
        if not run.steps:
            content = note("No step has been finished yet, so there is nothing to say.")
        elif not found:
            content = note("Nothing stands out: no part of a step costs more than a few per cent.")
        else:
            items = "".join(f"<li><b>{prose(one.figure)}</b> {prose(one.remedy)}</li>" for one in found)
            content = f'<ol class="help">{items}</ol>'
        blocks.append((run.name, content))
    return per_run(blocks)
