"""What would help a run: rules over the figures of a report, each with its number, the largest cost first."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from bytescale.common.units import format_bytes, format_seconds
from bytescale.report.parts import forecasts, mean_parts, typical, warm
from bytescale.report.runs import RunRecord

WORTH_SAYING = 0.05
"""Share of a step below which a cost is not mentioned."""
_BASELINES = ("naive", "static")
"""Planners that do not balance the ranks' times."""


class Advice(NamedTuple):
    """One thing that would help."""

    share: float
    """Of a step's time, which it costs at most; 0 where it is not a matter of time."""
    figure: str
    """What was measured, in a sentence with its number."""
    remedy: str


def advice_for(run: RunRecord) -> list[Advice]:
    """What would help, the largest cost first. Empty if nothing stands out, or if there are no steps."""
    found = [rule(run) for rule in RULES] if run.steps else []
    return sorted((advice for advice in found if advice is not None), key=lambda advice: -advice.share)


def _share(run: RunRecord, part: str) -> float:
    """Mean share of a step's time of one part, over the warm steps."""
    seconds = mean_parts(run)
    return seconds[part] / sum(seconds.values())


def data_comes_late(run: RunRecord) -> Advice | None:
    share = _share(run, "data")
    if share < WORTH_SAYING:
        return None
    planning, seconds = typical(run, "planning_seconds") or 0.0, typical(run, "step_seconds") or 0.0
    figure = f"Steps wait {share:.0%} of their time for data."
    if planning > seconds:
        return Advice(
            share,
            f"{figure} Planning a batch takes {format_seconds(planning)}, a step {format_seconds(seconds)}.",
            'Use `planner.name = "greedy"`, which plans faster.',
        )
    return Advice(
        share,
        figure,
        'The disk or the network is too slow for the ranks: use `data.loader = "ray"` with more `data.servers`.',
    )


def ranks_wait_in_rings(run: RunRecord) -> Advice | None:
    share = _share(run, "waiting")
    if share < WORTH_SAYING:
        return None
    sent = typical(run, "attention_bytes_sent")
    rings = f"; rings send {format_bytes(sent)} a step" if sent else ""
    remedies = []
    if run.settings["planner.name"] in _BASELINES:
        remedies.append(_better_planner(run))
    if sent:
        remedies.append("Raise `parallel.capacity_tokens` if memory allows: fewer ranks then have to share a sequence.")
    if not run.settings["cost.profile"]:
        remedies.append("Measure this machine with `bytescale profile` and set `cost.profile`: the planner then knows "
                        "what a message costs here.")  # fmt: skip
    figure = f"Ranks wait {share:.0%} of the time for each other inside forward and backward{rings}."
    return Advice(share, figure, " ".join(remedies))


def one_rank_computes_longer(run: RunRecord) -> Advice | None:
    imbalance = typical(run, "imbalance")
    if imbalance is None or imbalance < 1 + WORTH_SAYING:
        return None
    if run.settings["planner.name"] in _BASELINES:
        remedy = _better_planner(run)
    elif not run.settings["cost.calibrate"]:
        remedy = "Set `cost.calibrate = true`: ranks that are slower then get less work."
    else:
        remedy = "Measure this machine with `bytescale profile` and set `cost.profile`: equal plans then take as long."
    return Advice(
        (1.0 - 1.0 / imbalance) * _share(run, "compute"),
        f"The slowest rank computes {imbalance - 1:.0%} longer than the mean of all ranks, in the median step.",
        remedy,
    )


def _better_planner(run: RunRecord) -> str:
    return f'Use `planner.name = "adaptive"` instead of "{run.settings["planner.name"]}".'


def reduction_takes_long(run: RunRecord) -> Advice | None:
    share = _share(run, "sync")
    if share < WORTH_SAYING:
        return None
    return Advice(
        share,
        f"From the last backward until gradients are reduced, ranks spend {share:.0%} of the time. This includes the "
        "wait for ranks that compute longer.",
        "Raise `data.batch_tokens`: a reduction costs the same for a large batch, so twice the tokens would bring it "
        f"to about {share / (2 - share):.0%}.",
    )


def predictions_are_off(run: RunRecord) -> Advice | None:
    found = sorted(warm(forecasts(run)), key=lambda one: abs(one.error))
    if not found or abs(found[len(found) // 2].error) < 0.2:
        return None
    one = found[len(found) // 2]
    return Advice(
        0.0,
        f"Predicted times are off: step {one.step} was predicted to take {format_seconds(one.predicted)} and took "
        f"{format_seconds(one.measured)}.",
        "Plans are made from these times. Measure the machine while nothing else runs: `bytescale profile`, then "
        "`cost.profile`.",
    )


def a_rank_is_slow(run: RunRecord) -> Advice | None:
    speeds = run.calibration[-1]["speeds"] if run.calibration else [1.0]
    slowest = min(speeds)
    if slowest > 0.8 * median(speeds):
        return None
    return Advice(
        0.0,
        f"Rank {speeds.index(slowest)} has {slowest:.2f} of the middle rank's speed, after step "
        f"{run.calibration[-1]['step']}.",
        "Look what else runs on its device or its cores, and at its clock and temperature.",
    )


def some_steps_take_much_longer(run: RunRecord) -> Advice | None:
    costs = {int(line["step"]): line["step_seconds"] / max(1, line["num_tokens"]) for line in warm(run.steps)}
    middle = median(costs.values())
    slow = {step: cost for step, cost in costs.items() if cost > 1.5 * middle}
    lost = sum(cost - middle for cost in slow.values()) / sum(costs.values())
    if len(costs) < 8 or lost < 0.02:
        return None
    named = ", ".join(map(str, list(slow)[:6])) + (", ..." if len(slow) > 6 else "")
    return Advice(
        lost,
        f"{len(slow)} of {len(costs)} steps took more than 1.5 times the median time a token ({named}); together that "
        f"is {lost:.0%} of the run.",
        f"Trace one: `--log.trace-steps {next(iter(slow))}` shows which rank it waits for. Batches with one very long "
        "sequence, checkpoints and other programs on the machine are the usual causes.",
    )


RULES: tuple[Callable[[RunRecord], Advice | None], ...] = (
    data_comes_late,
    ranks_wait_in_rings,
    one_rank_computes_longer,
    reduction_takes_long,
    predictions_are_off,
    a_rank_is_slow,
    some_steps_take_much_longer,
)
