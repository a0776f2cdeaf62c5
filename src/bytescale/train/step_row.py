"""What the console shows of a step: one row, and a line of its own for each rare thing that happened in it."""

from __future__ import annotations

from bytescale.common.units import format_bytes, format_count, format_seconds, format_si
from bytescale.train.metrics import StepMetrics

ROW_COLUMNS = 110
"""Widest row of the console."""


def step_header(total_steps: int, *, mfu: bool) -> str:
    """The names of ``step_row``'s columns."""
    names = ("loss", "grad norm", "tok/s", "MFU" if mfu else "FLOP/s", "memory", "imbalance", "waiting")
    return "  ".join(("step".ljust(_step_width(total_steps)), *map(str.rjust, names, _WIDTHS), "groups"))


def step_row(metrics: StepMetrics, total_steps: int, width: int = ROW_COLUMNS) -> str:
    """One step as a row of at most ``width`` characters. Groups that find no room in it are in metrics.jsonl alone."""
    place = f"{metrics.step}/{total_steps}"
    cells = (
        f"{metrics.loss:.4f}",
        f"{metrics.grad_norm:.2f}",
        format_count(metrics.tokens_per_second),
        format_si(metrics.model_flops_per_second) if metrics.mfu is None else f"{metrics.mfu:.1%}",
        format_bytes(metrics.memory_bytes),
        f"{metrics.imbalance:.2f}",
        f"{metrics.waiting_share:.0%}",
    )
    row = "  ".join((place.ljust(_step_width(total_steps)), *map(str.rjust, cells, _WIDTHS), ""))
    groups = [f"{degree}x{count}" for degree, count in metrics.group_sizes.items()]
    shown = " ".join(groups)
    while len(row + shown) > width and groups:
        groups.pop()
        shown = " ".join([*groups, "..."])
    return row + shown


def remarks(metrics: StepMetrics, before: StepMetrics | None) -> list[str]:
    """Lines about what is rare: waiting for data, restarts of the loader, more FLOP/s than the peak.

    Args:
        metrics: of the step.
        before: of the step before it in this run; None for the first.
    """
    lines = []
    if metrics.data_wait_seconds > _DATA_WAIT_SHARE * metrics.step_seconds:
        lines.append(
            f"step {metrics.step} waited {format_seconds(metrics.data_wait_seconds)} for data, "
            f"{metrics.data_wait_seconds / metrics.step_seconds:.0%} of its time; its plan took "
            f"{format_seconds(metrics.planning_seconds)}"
        )
    if metrics.data_restarts > (before.data_restarts if before else 0):
        lines.append(f"the loader's servers or planner have been restarted, {metrics.data_restarts} in all so far")
    if _is_above_peak(metrics) and not (before and _is_above_peak(before)):
        reached = format_si(metrics.model_flops_per_second)
        lines.append(f"the ranks reach {reached}FLOP/s, more than their peak: trainer.peak_tflops is too low")
    return [f"        {line}" for line in lines]


def _is_above_peak(metrics: StepMetrics) -> bool:
    return metrics.mfu is not None and metrics.mfu > 1


_DATA_WAIT_SHARE = 0.01
"""Share of a step's time above which waiting for data is told."""
_WIDTHS = (7, 9, 6, 6, 8, 9, 7)


def _step_width(total_steps: int) -> int:
    return max(len("step"), 2 * len(str(total_steps)) + 1)
