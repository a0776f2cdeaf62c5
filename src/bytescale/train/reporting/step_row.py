"""The console's output for a step: one row, and one further line for each rare event."""

from __future__ import annotations

from bytescale.common.units import format_bytes, format_count, format_seconds, format_si
from bytescale.train.reporting.metrics import StepMetrics

ROW_COLUMNS = 110
"""Largest number of characters in a row."""


def step_header(total_steps: int, *, mfu: bool) -> str:
    names = ("loss", "grad norm", "lr", "tok/s", "MFU" if mfu else "FLOP/s", "memory", "imbalance", "waiting")
    return " ".join(("step".ljust(_step_width(total_steps)), *map(str.rjust, names, _WIDTHS), "groups"))


def step_row(metrics: StepMetrics, total_steps: int, width: int = ROW_COLUMNS) -> str:
    """Return one step as a row of at most ``width`` characters.

    If the group sizes do not all fit, the row shows the first of them and "...". metrics.jsonl always has all of them.
    """
    place = f"{metrics.step}/{total_steps}"
    cells = (
        f"{metrics.loss:.4f}",
        f"{metrics.grad_norm:.2f}",
        f"{metrics.learning_rate:.1e}".replace("e-0", "e-"),
        format_count(metrics.tokens_per_second),
        format_si(metrics.model_flops_per_second) if metrics.mfu is None else f"{metrics.mfu:.1%}",
        format_bytes(metrics.memory_bytes),
        f"{metrics.imbalance:.2f}",
        f"{metrics.waiting_share:.0%}",
    )
    row = " ".join((place.ljust(_step_width(total_steps)), *map(str.rjust, cells, _WIDTHS), ""))
    groups = [f"{degree}x{count}" for degree, count in metrics.group_sizes.items()]
    shown = " ".join(groups)
    while len(row + shown) > width and groups:
        groups.pop()
        shown = " ".join([*groups, "..."])
    return row + shown


def remarks(metrics: StepMetrics, before: StepMetrics | None) -> list[str]:
    """Return lines about rare events: waiting for data, restarts of the loader, slow steps.

    ``before``: the previous step in this run; None for the first, whose wait for its data is not told.
    """
    lines = []
    if before and metrics.data_wait_seconds > _DATA_WAIT_SHARE * metrics.step_seconds:
        lines.append(
            f"step {metrics.step} waited {format_seconds(metrics.data_wait_seconds)} for data, "
            f"{metrics.data_wait_seconds / metrics.step_seconds:.0%} of its time; its plan took "
            f"{format_seconds(metrics.planning_seconds)}"
        )
    if metrics.data_restarts > (before.data_restarts if before else 0):
        lines.append(f"a server of the data loader was restarted (restarts so far: {metrics.data_restarts})")
    predicted = metrics.predicted_seconds
    if predicted and metrics.step > _FIRST_STEPS and metrics.step_seconds > _SLOW * predicted:
        lines.append(
            f"step {metrics.step} took {format_seconds(metrics.step_seconds)}, "
            f"{metrics.step_seconds / predicted:.1f} times the {format_seconds(predicted)} that were predicted"
        )
    return [f"        {line}" for line in lines]


_SLOW = 1.5
"""A step is reported if it takes more than so many times what was predicted."""
_FIRST_STEPS = 5
"""Predictions of these steps are made before enough was measured."""
_DATA_WAIT_SHARE = 0.01
"""Waiting for data is reported if it takes more than this share of a step's time."""
_WIDTHS = (7, 9, 6, 6, 6, 8, 9, 7)


def _step_width(total_steps: int) -> int:
    return max(len("step"), 2 * len(str(total_steps)) + 1)
