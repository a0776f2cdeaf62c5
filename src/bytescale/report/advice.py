"""What would help a run: rules over the figures of a report, each with its number, the largest cost first.

A rule is a function from a run to one ``Advice`` or None. It speaks only of what costs more than a few per cent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from bytescale.common.units import format_bytes, format_count, format_seconds
from bytescale.report.parts import all_parts, forecasts, mean_parts, rank_times, typical, warm
from bytescale.report.runs import RunRecord

WORTH_SAYING = 0.05
"""Share of a step below which a cost is not mentioned."""
_BASELINES = ("naive", "static")
"""Planners that do not balance the ranks' times."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing that would help.

    Attributes:
        share: of a step's time, which it costs at most; 0 where it is not a matter of time.
        figure: what was measured, in a sentence with its number.
        remedy: what to do about it.
    """

    share: float
    figure: str
    remedy: str


def advice_for(run: RunRecord) -> list[Advice]:
    """What would help, the largest cost first. Empty if nothing stands out, or if there are no steps."""
    if not run.steps:
        return []
    found = [advice for rule in RULES for advice in [rule(run)] if advice is not None]
    return sorted(found, key=lambda advice: -advice.share)


def _shares(run: RunRecord) -> dict[str, float]:
    """Mean share of a step's time of each part, over the warm steps."""
    parts = warm(all_parts(run))
    seconds = mean_parts(parts)
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}


def data_comes_late(run: RunRecord) -> Advice | None:
    """Steps that wait for their loader."""
    share = _shares(run)["data"]
    if share < WORTH_SAYING:
        return None
    planning, seconds = typical(run, "planning_seconds") or 0.0, typical(run, "step_seconds") or 0.0
    figure = f"Steps wait {share:.0%} of their time for data."
    if planning > seconds:
        return Advice(
            share=share,
            figure=f"{figure} Planning a batch takes {format_seconds(planning)}, a step {format_seconds(seconds)}.",
            remedy='Let one planner plan for all ranks (`data.loader = "ray"`), or use `planner.name = "paper"`, '
            "which plans faster.",
        )
    return Advice(
        share=share,
        figure=figure,
        remedy="Raise `data.prefetch_steps`, so that slow batches are read earlier. If every step waits, the disk or "
        'the network is too slow for the ranks: use `data.loader = "ray"` with more `data.servers`.',
    )


def ranks_wait_in_rings(run: RunRecord) -> Advice | None:
    """Waiting inside forward and backward."""
    share = _shares(run)["waiting"]
    if share < WORTH_SAYING:
        return None
    sent = typical(run, "attention_bytes_sent") or 0.0
    figure = f"Ranks wait {share:.0%} of the time for each other inside forward and backward"
    figure += f"; rings send {format_bytes(sent)} a step." if sent else "."
    remedies = []
    if run.settings["planner.name"] in _BASELINES:
        remedies.append(f'Use `planner.name = "adaptive"` instead of "{run.settings["planner.name"]}"')
    if sent:
        capacity = run.settings["parallel.capacity_tokens"]
        now = f" (now {format_count(capacity)})" if isinstance(capacity, int) and capacity else ""
        remedies.append(
            f"Raise `parallel.capacity_tokens`{now} if memory allows: fewer ranks then have to share a sequence"
        )
        if run.settings["parallel.ring_gradients"] == "wide":
            remedies.append('`parallel.ring_gradients = "bf16"` halves the bytes of gradients in rings')
    if not run.settings["cost.profile"]:
        remedies.append("Measure this machine with `bytescale profile` and set `cost.profile`: the planner then knows "
                        "what a message costs here")  # fmt: skip
    return Advice(share=share, figure=figure, remedy=". ".join(remedies) + ".")


def one_rank_computes_longer(run: RunRecord) -> Advice | None:
    """The slowest rank's compute over the mean."""
    imbalance = typical(run, "imbalance")
    if imbalance is None or imbalance < 1 + WORTH_SAYING:
        return None
    share = 1.0 - 1.0 / imbalance
    remedy = (
        "Measure this machine with `bytescale profile` and set `cost.profile`, so that equal plans take equal times."
    )
    if not run.settings["cost.calibrate"]:
        remedy = "Set `cost.calibrate = true`: ranks that are slower then get less work."
    if run.settings["planner.name"] in _BASELINES:
        remedy = f'Use `planner.name = "adaptive"` instead of "{run.settings["planner.name"]}".'
    return Advice(
        share=share * _shares(run)["compute"],
        figure=f"The slowest rank computes {imbalance - 1:.0%} longer than the mean of all ranks, in the median step.",
        remedy=remedy,
    )


def reduction_takes_long(run: RunRecord) -> Advice | None:
    """Gradients at the end of steps."""
    share = _shares(run)["sync"]
    if share < WORTH_SAYING:
        return None
    tokens = int(run.settings["data.batch_tokens"]) if str(run.settings["data.batch_tokens"]).isdigit() else None
    remedies = []
    if not run.settings["parallel.gradient_bucket_mib"]:
        remedies.append("Set `parallel.gradient_bucket_mib` to 1: gradients are then reduced while ranks still compute")
    half = share / (2 - share)
    batch = f" (now {format_count(tokens)})" if tokens else ""
    remedies.append(
        f"Raise `data.batch_tokens`{batch}: a reduction costs the same for a large batch, so twice the tokens would "
        f"bring it to about {half:.0%}"
    )
    return Advice(
        share=share,
        figure=f"From the last backward until gradients are reduced, ranks spend {share:.0%} of the time. This "
        "includes the wait for ranks that compute longer.",
        remedy=". ".join(remedies) + ".",
    )


def predictions_are_off(run: RunRecord) -> Advice | None:
    """Predicted and measured step times."""
    errors = [abs(forecast.error) for forecast in warm(forecasts(run))]
    if not errors or median(errors) < 0.2:
        return None
    forecast = sorted(warm(forecasts(run)), key=lambda one: abs(one.error))[len(errors) // 2]
    return Advice(
        share=0.0,
        figure=f"Predicted times are off: step {forecast.step} was predicted to take "
        f"{format_seconds(forecast.predicted)} and took {format_seconds(forecast.measured)}.",
        remedy="Plans are made from these times. Measure the machine while nothing else runs: `bytescale profile`, "
        "then `cost.profile`."
        + (" The profile in use is of another state of this machine." if run.settings["cost.profile"] else ""),
    )


def a_rank_is_slow(run: RunRecord) -> Advice | None:
    """In traced steps: a rank that takes longer than its share of the predicted compute."""
    slowness: dict[int, list[float]] = {}
    for trace in run.traces:
        times = [one for one in rank_times(trace) if one.predicted_compute and one.compute > 0]
        ratios = [one.compute / one.predicted_compute for one in times if one.predicted_compute]
        for one, ratio in zip(times, ratios, strict=True):
            slowness.setdefault(one.rank, []).append(ratio / median(ratios))
    if len(slowness) < 2:
        return None
    rank, factor = max(((rank, median(found)) for rank, found in slowness.items()), key=lambda item: item[1])
    if factor < 1.25:
        return None
    return Advice(
        share=0.0,
        figure=f"Rank {rank} takes {factor:.2f} times as long as the other ranks for the same predicted work, in "
        f"{len(run.traces)} traced step{'s' if len(run.traces) > 1 else ''}.",
        remedy="Look what else runs on its device or its cores, and at its clock and temperature.",
    )


def some_steps_take_much_longer(run: RunRecord) -> Advice | None:
    """Steps far above the median, per token."""
    costs = [(int(line["step"]), float(line["step_seconds"]) / max(1, line["num_tokens"])) for line in warm(run.steps)]
    if len(costs) < 8:
        return None
    middle = median(cost for _, cost in costs)
    slow = [step for step, cost in costs if cost > 1.5 * middle]
    lost = sum(cost - middle for _, cost in costs if cost > 1.5 * middle) / sum(cost for _, cost in costs)
    if not slow or lost < 0.02:
        return None
    named = f"step{'s' if len(slow) > 1 else ''} " + ", ".join(map(str, slow[:6])) + (", ..." if len(slow) > 6 else "")
    return Advice(
        share=lost,
        figure=f"{len(slow)} of {len(costs)} steps took more than 1.5 times the median time a token ({named}); "
        f"together that is {lost:.0%} of the run.",
        remedy=f"Trace one: `--log.trace-steps {slow[0]}` shows which rank it waits for. Batches with one "
        "very long sequence, checkpoints and other programs on the machine are the usual causes.",
    )


def memory_is_left(run: RunRecord) -> Advice | None:
    """Peak memory far below the limit, where sequences are shared."""
    limit, peak = run.settings["memory.device_gib"], max(filter(None, run.column("memory_bytes")), default=0.0)
    batches = run.batches
    if not limit or not peak or batches is None or not (batches.degrees > 1).any():
        return None
    used = peak / (float(limit) * 2**30)
    if used > 0.6:
        return None
    return Advice(
        share=0.0,
        figure=f"The fullest rank uses {format_bytes(peak)}, {used:.0%} of `memory.device_gib = {limit}`.",
        remedy='Set `parallel.capacity_tokens = "auto"`: larger micro-batches need fewer ranks for a long sequence.',
    )


RULES: tuple[Callable[[RunRecord], Advice | None], ...] = (
    data_comes_late,
    ranks_wait_in_rings,
    one_rank_computes_longer,
    reduction_takes_long,
    predictions_are_off,
    a_rank_is_slow,
    some_steps_take_much_longer,
    memory_is_left,
)
