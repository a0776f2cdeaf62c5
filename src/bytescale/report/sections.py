"""The sections of a report. Each takes all runs and returns HTML; empty where no run has anything to show."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

import numpy as np

from bytescale.common.units import format_bytes, format_count, format_seconds, format_si
from bytescale.report.charts import (
    Series,
    grouped_columns,
    legend,
    line_chart,
    ranks_over_time,
    share_bar,
    stacked_columns,
)
from bytescale.report.html import details, note, per_run, table
from bytescale.report.learned import learned
from bytescale.report.parts import (
    PARTS,
    Forecast,
    all_parts,
    forecasts,
    mean_parts,
    rank_times,
    typical,
    warm,
)
from bytescale.report.runs import RunRecord
from bytescale.simulator.step_trace import StepTrace

LAST = 5  # steps over which the last loss is averaged: one batch's loss depends on its documents
PART_NAMES = {
    "compute": "compute",
    "waiting": "waiting for other ranks",
    "sync": "reducing gradients",
    "data": "waiting for data",
    "other": "update and the rest",
}
TRACE_KEYS = (
    ("k-forward", "forward"),
    ("k-backward", "backward"),
    ("k-wait", "waiting for other ranks"),
    ("k-reduction", "reducing gradients"),
    ("k-update", "update"),
    ("k-report", "agreement, sums"),
    ("k-data", "waiting for data"),
)


def overview_section(runs: Sequence[RunRecord]) -> str:
    """Key figures, a column per run."""
    rows = [
        ["steps", *[f"{run.step_numbers[-1] if run.steps else 0} of {run.settings['trainer.steps']}" for run in runs]],
        ["ranks", *[_ranks(run) for run in runs]],
        ["planner", *[str(run.settings["planner.name"]) for run in runs]],
        [f"loss (mean of the last {LAST})", *[_last_loss(run) for run in runs]],
        ["tokens/s (median)", *[_typical(run, "tokens_per_second", format_count) for run in runs]],
        ["FLOP/s (median)", *[_typical(run, "model_flops_per_second", format_si) for run in runs]],
        ["MFU (median)", *[_typical(run, "mfu", "{:.1%}".format) for run in runs]],
        ["step (median)", *[_typical(run, "step_seconds", format_seconds) for run in runs]],
        ["time computing", *[_computing(run) for run in runs]],
        ["peak memory of a rank", *[_most(run, "memory_bytes") for run in runs]],
        ["sent by rings, a step", *[_typical(run, "attention_bytes_sent", format_bytes) for run in runs]],
    ]
    rows = [row for row in rows if any(cell != "-" for cell in row[1:])]
    return table(["", *[run.name for run in runs]], rows, css="figures") + _comparison(runs)


def loss_section(runs: Sequence[RunRecord]) -> str:
    """The loss of all runs on one pair of axes, with that on evaluation data, and the last evaluations by length."""
    evaluated = [
        Series(
            name=f"{run.name}, evaluation" if len(runs) > 1 else "evaluation",
            css=f"s{place % 6} dashed",
            xs=[float(line["step"]) for line in run.evaluations],
            ys=[float(line["loss"]) for line in run.evaluations],
        )
        for place, run in enumerate(runs)
        if run.evaluations
    ]
    chart = line_chart([*_series(runs, "loss"), *evaluated], label="{:.3g}".format)
    return chart + per_run([(run.name, _by_length(run)) for run in runs])


def throughput_section(runs: Sequence[RunRecord]) -> str:
    """Tokens per second of all runs."""
    return line_chart(_series(runs, "tokens_per_second"), label=format_count, from_zero=True)


def time_section(runs: Sequence[RunRecord]) -> str:
    """The parts of a step's time, on average and step by step."""
    if not any(run.steps for run in runs):
        return ""
    blocks = []
    highest = max(one.step_seconds for run in runs for one in all_parts(run))
    for run in runs:
        parts = all_parts(run)
        if not parts:
            continue
        means = mean_parts(warm(parts))
        total = sum(means.values())
        bar = share_bar([(f"p-{part}", PART_NAMES[part], means[part] / total) for part in PARTS])
        columns = [(float(one.step), [(f"p-{part}", one.seconds[part]) for part in PARTS]) for one in parts]
        rows = [[PART_NAMES[part], format_seconds(means[part]), f"{means[part] / total:.1%}"] for part in PARTS]
        chart = stacked_columns(columns, highest=highest, label=format_seconds)
        blocks.append((run.name, bar + chart + details("As a table", table(["", "mean of a step", "share"], rows))))
    keys = legend([(f"p-{part}", PART_NAMES[part]) for part in PARTS])
    text = note(
        "Means over ranks; the bar leaves out the first steps. Waiting is inside forward and backward. Reducing begins "
        "after the last backward of a rank and includes the wait for ranks that compute longer."
    )
    if any(run.steps and "sync_seconds" not in run.steps[0] for run in runs):
        text += note("A run of an older version counts reducing and the update as waiting.")
    return keys + per_run(blocks) + text


def traces_section(runs: Sequence[RunRecord]) -> str:
    """Ranks over time in the traced steps."""
    if not any(run.traces or run.settings["log.trace_steps"] for run in runs):
        last = max((int(run.settings["trainer.steps"]) for run in runs), default=1)
        return note(
            f"No step was traced. With `bytescale train ... --log.trace-steps {min(5, last)}`, this shows what "
            "every rank did in that step, beside what was predicted."
        )
    blocks = [(run.name, _missing_traces(run)) for run in runs]
    if not any(run.traces for run in runs):
        return per_run(blocks)
    ends = [span.end for run in runs for trace in run.traces for track in trace.measured for span in track.spans]
    ends += [span.end for run in runs for trace in run.traces for track in trace.predicted for span in track.spans]
    until = max(ends) if len(runs) > 1 else None  # runs are compared on equal axes
    drawn = ["".join(_one_trace(trace, until) for trace in run.traces) for run in runs]
    return legend(TRACE_KEYS) + per_run(
        [(name, charts + missing) for charts, (name, missing) in zip(drawn, blocks, strict=True)]
    )


def batches_section(runs: Sequence[RunRecord]) -> str:
    """Lengths of sequences, and over how many ranks they were shared."""
    blocks = []
    for run in runs:
        found = run.batches
        if found is None:
            continue
        bins = np.floor(np.log2(np.maximum(found.lengths, 1))).astype(int)
        low, high = int(bins.min()), int(bins.max())
        counts = np.bincount(bins - low, minlength=high - low + 1)
        tokens = np.bincount(bins - low, weights=found.lengths, minlength=high - low + 1)
        names = [
            f"{format_count(2**exponent)}-{format_count(2 ** (exponent + 1) - 1)}" for exponent in range(low, high + 1)
        ]
        if found.lengths.max() == 2**high:
            names[-1] = format_count(2**high)
        chart = grouped_columns(
            names,
            [
                ("p-compute", "share of sequences", (counts / counts.sum()).tolist()),
                ("p-sync", "share of tokens", (tokens / tokens.sum()).tolist()),
            ],
            "tokens of a sequence",
        )
        degrees = np.unique(found.group_degrees)
        rows = []
        for degree in degrees.tolist():
            own, sequences = found.group_degrees == degree, found.degrees == degree
            share = found.group_tokens[own].sum() / found.group_tokens.sum()
            rows.append([str(degree), f"{own.sum() / found.num_plans:.1f}", f"{sequences.sum()}", f"{share:.1%}"])
        chart += table(["ranks that share", "groups a step", "sequences", "share of tokens"], rows)
        longest = format_count(int(found.lengths.max()))
        chart += note(
            f"Of {len(found.lengths)} sequences in the plans of {found.num_plans} steps; the longest has {longest} "
            "tokens."
        )
        blocks.append((run.name, chart))
    return per_run(blocks) if blocks else ""


def memory_section(runs: Sequence[RunRecord]) -> str:
    """Peak memory of the fullest rank, and what was expected."""
    chart = line_chart(_series(runs, "memory_bytes"), label=format_bytes, from_zero=True)
    if not chart:
        return ""
    expected = [(run.name, "".join(note(line) for line in run.log if line.startswith("memory  "))) for run in runs]
    return (
        chart
        + note("The largest of any rank so far. On a GPU what tensors occupy, on a CPU the whole process.")
        + per_run(expected)
    )


def calibration_section(runs: Sequence[RunRecord]) -> str:
    """Predicted step times beside measured ones, and what was learned of costs and speeds."""
    blocks = []
    for run in runs:
        found = forecasts(run)
        if not found:
            continue
        steps = [float(one.step) for one in found]
        lines = [
            Series(name="measured", css="s-measured", xs=steps, ys=[one.measured for one in found]),
            Series(name="predicted", css="s-predicted", xs=steps, ys=[one.predicted for one in found]),
        ]
        chart = line_chart(lines, label=format_seconds, from_zero=True) if len(found) > 2 else ""
        blocks.append((run.name, chart + _errors(run, found) + learned(run)))
    if not blocks:
        return note("Nothing was predicted for these runs: metrics.jsonl has no predictions, and no step was traced.")
    return per_run(blocks)


def settings_section(runs: Sequence[RunRecord]) -> str:
    """The settings in which runs differ, and all of them on a click."""
    names = sorted({name for run in runs for name in run.settings})
    rows = [[name, *[_setting(run.settings.get(name)) for run in runs]] for name in names]
    head = ["", *[run.name for run in runs]]
    different = [row for row in rows if len(set(row[1:])) > 1 and row[0] != "trainer.run_dir"]
    first = ""
    if len(runs) > 1:
        first = table(head, different) if different else note("All settings are the same.")
    return first + details("All settings", table(head, rows))


def _missing_traces(run: RunRecord) -> str:
    """What became of the steps that should have been traced and were not."""
    traced = {trace.metadata.step for trace in run.traces}
    wanted = [int(step) for step in run.settings["log.trace_steps"]]
    last = run.step_numbers[-1] if run.steps else 0
    coming = [str(step) for step in wanted if step > last and step not in traced]
    past = [str(step) for step in wanted if step <= last and step not in traced]
    lines = []
    if coming:
        when = "when the run comes to it" if run.state == "running" else "if the run is continued so far"
        lines.append(f"Step {', '.join(coming)} will be traced {when}.")
    if past:
        lines.append(f"There is no trace of step {', '.join(past)}; log.txt says why.")
    return note(" ".join(lines)) if lines else ""


def _by_length(run: RunRecord) -> str:
    """The newest evaluation, by the length of sequences."""
    buckets = run.evaluations[-1].get("buckets", []) if run.evaluations else []
    rows = [
        [
            "longer" if bucket["longest_tokens"] is None else f"up to {format_count(bucket['longest_tokens'])}",
            f"{bucket['loss']:.4f}",
            f"{bucket['perplexity']:.2f}",
            format_count(bucket["num_targets"]),
        ]
        for bucket in buckets
    ]
    if not rows:
        return ""
    head = ["tokens of a sequence", "loss", "perplexity", "targets"]
    return details(f"Evaluation after step {run.evaluations[-1]['step']}, by length", table(head, rows))


def _one_trace(trace: StepTrace, until: float | None) -> str:
    metadata = trace.metadata
    heading = (
        f"<h4>Step {metadata.step}: {format_seconds(metadata.measured_seconds)}, predicted "
        f"{format_seconds(metadata.predicted_seconds)}</h4>"
    )
    rows = []
    for one in rank_times(trace):
        predicted = "-" if one.predicted_compute is None else format_seconds(one.predicted_compute)
        times = (one.compute, one.ring, one.other_waits, one.sync, one.data, one.update)
        seconds = [format_seconds(value) for value in times]
        rows.append([f"rank {one.rank}, {one.name}", seconds[0], predicted, *seconds[1:]])
    head = ["", "compute", "predicted", "ring waits", "other waits", "reduction", "data", "update"]
    return heading + ranks_over_time(trace, until=until) + details("Rank by rank", table(head, rows))


def _errors(run: RunRecord, found: list[Forecast]) -> str:
    late = warm(found)
    text = (
        f"Median error of {len(late)} step{'s' if len(late) > 1 else ''}: "
        f"{median(abs(one.error) for one in late):.0%} of the measured time."
    )
    rows = [
        [f"step {one.step}", format_seconds(one.predicted), format_seconds(one.measured), f"{one.error:+.0%}"]
        for one in found
    ]
    content = table(["", "predicted", "measured", "error"], rows)
    return note(text) + (content if len(rows) <= 8 else details("Step by step", content))


def _comparison(runs: Sequence[RunRecord]) -> str:
    """The runs' speed and loss against the first run's, in sentences."""
    sentences = []
    base = typical(runs[0], "tokens_per_second")
    for run in runs[1:]:
        speed = typical(run, "tokens_per_second")
        if base and speed:
            sentences.append(f"{run.name} trains {speed / base:.2f} times as many tokens a second as {runs[0].name}.")
        both = set(run.step_numbers) & set(runs[0].step_numbers)
        if both:
            step = max(both)
            own, other = (next(line["loss"] for line in one.steps if line["step"] == step) for one in (run, runs[0]))
            sentences.append(f"At step {step} its loss is {own:.4f}, and {other:.4f} in {runs[0].name}.")
    return note(" ".join(sentences)) if sentences else ""


def _series(runs: Sequence[RunRecord], name: str) -> list[Series]:
    return [
        Series(name=run.name, css=f"s{place % 6}", xs=[float(step) for step in run.step_numbers], ys=run.column(name))
        for place, run in enumerate(runs)
    ]


def _ranks(run: RunRecord) -> str:
    tp, pp = run.settings["parallel.tp"], run.settings["parallel.pp"]
    degrees = "".join(f", {name} {size}" for name, size in (("tp", tp), ("pp", pp)) if size > 1)
    there = len(run.steps[-1].get("data_bytes_read", [])) if run.steps else 0
    return f"{there or run.settings['parallel.ranks']}{degrees}"


def _last_loss(run: RunRecord) -> str:
    losses = [loss for loss in run.column("loss") if loss is not None][-LAST:]
    return f"{mean(losses):.4f}" if losses else "-"


def _computing(run: RunRecord) -> str:
    if not run.steps:
        return "-"
    means = mean_parts(warm(all_parts(run)))
    return f"{means['compute'] / sum(means.values()):.0%}"


def _typical(run: RunRecord, name: str, text: object) -> str:
    value = typical(run, name)
    assert callable(text), "a function from a number to a text"
    return "-" if value is None else str(text(value))


def _most(run: RunRecord, name: str) -> str:
    values = [value for value in run.column(name) if value is not None]
    return format_bytes(max(values)) if values else "-"


def _setting(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "unset" if value is None or value == "" else str(value)
