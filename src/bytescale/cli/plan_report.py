"""Plans as people read them: a table per planner, the critical sequence, and what would help."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from bytescale.common.units import format_bytes, format_count, format_seconds
from bytescale.cost import CostModel
from bytescale.cost.memory import MemoryModel
from bytescale.plan import Plan
from bytescale.plan.slices import micro_batch_tokens
from bytescale.plan.summary import degree_histogram
from bytescale.simulator import SimulatedStep

NOTICEABLE = 0.05  # of the step
CRITICAL = 0.8  # of the step: one sequence sets its length


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One planner's answer."""

    plan: Plan
    step: SimulatedStep
    planning_seconds: float

    @property
    def imbalance(self) -> float:
        """Slowest rank over mean, of what ranks do themselves (waiting left out)."""
        own = (self.step.compute + self.step.exposed_ring + self.step.exposed_offload).sum(axis=1)
        return float(own.max() / own.mean())

    @property
    def ring_bytes(self) -> float:
        return self.step.traffic.ring_intra_node + self.step.traffic.ring_inter_node

    @property
    def waiting(self) -> float:
        """Mean share of the step that ranks wait."""
        shares = self.step.shares()
        return shares["members"] + shares["dp bubble"] + shares["pp bubble"]


def print_comparison(console: Console, planned: dict[str, Planned], ideal_seconds: float) -> None:
    """One row per planner. ``ideal_seconds``: all work spread evenly, nothing else."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("planner", no_wrap=True)
    columns = ("step", "vs\nstatic", "vs\nideal", "slowest\n/ mean", "ring\nexposed", "ranks\nwait", "ring\nbytes")
    for name in (*columns, "planned\nin"):
        table.add_column(name, justify="right", no_wrap=True)
    base = planned["static"].step.step_seconds if "static" in planned else None
    for name, item in planned.items():
        step = item.step
        table.add_row(
            name,
            format_seconds(step.step_seconds),
            f"{base / step.step_seconds:.2f}x" if base else "",
            f"{step.step_seconds / ideal_seconds:.2f}x",
            f"{item.imbalance:.2f}",
            f"{step.shares()['ring']:.1%}",
            f"{item.waiting:.1%}",
            format_bytes(item.ring_bytes),
            format_seconds(item.planning_seconds),
        )
    console.print(table)
    console.print(f"ideal: all compute spread evenly, {format_seconds(ideal_seconds)}", highlight=False)


def print_details(console: Console, name: str, planned: dict[str, Planned], cost: CostModel) -> None:
    """Degrees, bytes saved, the critical sequence, memory, and what would help, for one planner."""
    item = planned[name]
    console.print(f"\n[bold]{name}[/bold]", highlight=False)
    if "static" in planned and planned["static"].ring_bytes > 0:
        saved = 1 - item.ring_bytes / planned["static"].ring_bytes
        console.print(f"  ring bytes saved over static: {saved:.1%}", highlight=False)
    console.print("  slice groups by degree: " + degrees_in_words(item.plan), highlight=False, soft_wrap=True)
    counts = np.diff(item.plan.rank_micro_batch_offsets)
    peak = item.step.peak_activation_bytes.max()
    console.print(
        f"  micro-batches a rank: {counts.min()} to {counts.max()}; activations at most {format_bytes(peak)} a device",
        highlight=False,
    )
    critical = critical_sequence(item)
    where = f"over {critical.degree} ranks" if critical.degree > 1 else "on one rank"
    console.print(
        f"  critical sequence: number {critical.sequence}, {format_count(critical.length)} tokens {where}, "
        f"{format_seconds(critical.seconds)}, {critical.share:.0%} of the step",
        highlight=False,
        soft_wrap=True,
    )
    console.print("  what would help:", highlight=False)
    for line in what_would_help(item, critical, cost):
        console.print("    - " + line, highlight=False, soft_wrap=True)


def memory_in_words(plan: Plan, model: MemoryModel, device_bytes: float) -> str:
    """Peak memory of the plan's fullest micro-batch, part by part (``cost.memory``), and whether a device holds it."""
    tokens, limits = micro_batch_tokens(plan), model.limits()
    peaks = limits.device_peak(tokens.held, tokens.offloaded, tokens.shared)
    worst = int(peaks.argmax())
    held, shared = int(tokens.held[worst]), int(tokens.shared[worst])
    phase = limits.worst_phase(held, shared)
    too_much = (
        f"\nThat is more than the {format_bytes(device_bytes)} of a device. To fix: more devices per rank (tp, pp), a "
        "smaller capacity on more ranks, or another device_gib"
    )
    return (
        f"memory at {model.element_bytes} bytes a number: {format_bytes(float(peaks[worst]))} a device at the peak of "
        f"its fullest micro-batch "
        f"({format_count(held)} tokens): parameters {format_bytes(model.parameter_bytes)}, gradients "
        f"{format_bytes(model.gradient_bytes)}, optimizer {format_bytes(model.optimizer_bytes)}, activations "
        f"{format_bytes(float(model.saved_bytes_per_token * held))}, {phase.name} "
        f"{format_bytes(float(phase.bytes(held, shared)))}"
        + (f"; attention in {model.head_groups} groups of heads" if model.head_groups > 1 else "")
        + (too_much if peaks[worst] > device_bytes else "")
    )


def degrees_in_words(plan: Plan, *, most: int = 8) -> str:
    """``2 over 256 ranks, 5 over 40, 3700 on one``: the widest first, the rest of many summed up."""
    histogram = degree_histogram(plan)
    shared = [(degree, count) for degree, count in histogram.items() if degree > 1]
    words = [f"{count} over {degree} ranks" for degree, count in shared[:most]]
    if len(shared) > most:
        rest = shared[most:]
        words.append(f"{sum(count for _, count in rest)} over {rest[-1][0]}-{rest[0][0]}")
    return ", ".join([*words, f"{histogram.get(1, 0)} packs on one rank"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Critical:
    """The sequence whose micro-batch runs longest."""

    sequence: int
    length: int
    degree: int
    seconds: float
    share: float  # of the step


def critical_sequence(item: Planned) -> Critical:
    """The longest sequence of the micro-batch that takes longest, on the stage where it does."""
    plan, events = item.plan, item.step.events
    seconds = item.step.stage_event_seconds.max(axis=1)
    event = int(seconds.argmax())
    micro_batch = int(events.member_micro_batches[events.member_offsets[event]])
    groups = plan.groups_of(micro_batch)
    inside = np.concatenate([plan.sequences_of(int(group)) for group in groups])
    sequence = int(inside[plan.lengths[inside].argmax()])
    return Critical(
        sequence=sequence,
        length=int(plan.lengths[sequence]),
        degree=int(plan.group_sizes[groups[0]]),
        seconds=float(seconds[event]),
        share=float(seconds[event]) / item.step.step_seconds,
    )


def what_would_help(item: Planned, critical: Critical, cost: CostModel) -> list[str]:
    """Advice with numbers, the largest loss first; one line that says so when there is nothing to gain."""
    shares = item.step.shares()
    losses: list[tuple[float, str]] = []
    if shares["ring"] > NOTICEABLE:
        losses.append((shares["ring"], _ring_advice(cost)))
    waiting = shares["dp bubble"] + shares["members"]
    if waiting > NOTICEABLE:
        losses.append((waiting, _waiting_advice(item)))
    if shares["pp bubble"] > NOTICEABLE:
        text = "fewer stages, or more tokens a batch: pipelines fill and drain"
        losses.append((shares["pp bubble"], text))
    if shares["gradient sync"] > NOTICEABLE:
        losses.append((shares["gradient sync"], "more tokens a batch: gradients are reduced once a step"))
    if shares["offload"] > NOTICEABLE:
        losses.append((shares["offload"], "smaller offload ratios: transfers outlast the layers that hide them"))
    losses.sort(reverse=True)
    advice = [f"{share:.0%} of the step: {text}" for share, text in losses]
    if critical.share > CRITICAL:
        advice.append(
            f"more devices help only as far as sequence {critical.sequence} is spread over more than {critical.degree} "
            "ranks, which the adaptive planner does where it pays; or shorten the context"
        )
    elif not losses:
        advice.append(f"ranks compute {shares['compute']:.0%} of the step: only more or faster devices")
    return advice


def _ring_advice(cost: CostModel) -> str:
    """Where a member's block takes as long as its transfer: a C^2 = bytes C / bandwidth."""
    rate = cost.inter_node_bytes_per_second
    tokens = cost.ring_bytes_per_token / rate / cost.attention_seconds_per_pair
    return (
        f"ring traffic that attention does not hide. From {format_count(tokens)} tokens a rank on, one long sequence "
        "hides its own: raise the capacity, or keep short sequences out of rings"
    )


def _waiting_advice(item: Planned) -> str:
    counts = np.diff(item.plan.rank_micro_batch_offsets)
    if counts.min() == 0:
        return f"{int((counts == 0).sum())} ranks have nothing to do: more tokens a batch, or fewer ranks"
    return "ranks wait for each other: more tokens a batch, a smaller capacity (finer pieces), or another planner"
