"""Reports about plans for people: a table of planners, the critical sequence, and what would help."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from bytescale.common.units import format_bytes, format_count, format_seconds
from bytescale.cost import CostModel
from bytescale.cost.memory import DeviceMemory
from bytescale.plan import Plan
from bytescale.plan.slices import micro_batch_tokens
from bytescale.plan.summary import shape_histogram, shape_in_words
from bytescale.simulator import SimulatedStep

NOTICEABLE = 0.05  # share of the step from which a loss is reported
CRITICAL = 0.8  # share of the step from which one sequence is said to decide the step time


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan of one planner, and its simulated step."""

    plan: Plan
    step: SimulatedStep
    planning_seconds: float

    @property
    def imbalance(self) -> float:
        """The slowest rank's own work over the mean of all ranks. Waiting does not count."""
        own = (self.step.compute + self.step.exposed_ring + self.step.exposed_offload).sum(axis=1)
        return float(own.max() / own.mean())

    @property
    def ring_bytes(self) -> float:
        return self.step.traffic.ring_intra_node + self.step.traffic.ring_inter_node

    @property
    def waiting(self) -> float:
        """The mean share of the step that ranks wait."""
        shares = self.step.shares()
        return shares["members"] + shares["dp bubble"] + shares["pp bubble"]


def print_comparison(console: Console, planned: dict[str, Planned], ideal_seconds: float) -> None:
    """Print one row per planner. ``ideal_seconds``: the time if ranks only computed, all equally much."""
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
    console.print(table, soft_wrap=False)
    console.print(f"ideal: {format_seconds(ideal_seconds)}, if all compute were spread evenly over the ranks")


def print_details(console: Console, name: str, planned: dict[str, Planned], cost: CostModel) -> None:
    """Print details of one planner: degrees, bytes saved, the critical sequence, memory, and what would help."""
    item = planned[name]
    console.print(f"\n[bold]{name}[/bold]")
    if "static" in planned and planned["static"].ring_bytes > 0:
        saved = 1 - item.ring_bytes / planned["static"].ring_bytes
        console.print(f"  ring bytes saved compared with static: {saved:.1%}")
    console.print("  slice groups by degree: " + degrees_in_words(item.plan))
    counts = np.diff(item.plan.rank_micro_batch_offsets)
    console.print(f"  micro-batches per rank: {counts.min()} to {counts.max()}")
    critical = critical_sequence(item)
    where = f"over {critical.degree} ranks" if critical.degree > 1 else "on one rank"
    console.print(
        f"  critical sequence: number {critical.sequence}, {format_count(critical.length)} tokens {where}, "
        f"{format_seconds(critical.seconds)}, {critical.share:.0%} of the step"
    )
    console.print("  what would help:")
    for line in what_would_help(item, critical, cost):
        console.print("    - " + line)


def memory_in_words(plan: Plan, model: DeviceMemory, device_bytes: float) -> str:
    """Describe the peak memory of the fullest micro-batch by its parts, and whether a device has as much."""
    tokens, limits = micro_batch_tokens(plan), model.limits()
    peaks = limits.device_peak(tokens.held, tokens.offloaded, tokens.shared, tokens.row)
    worst = int(peaks.argmax())
    held, shared = int(tokens.held[worst]), int(tokens.shared[worst])
    too_much = (
        f"\nThat is more than the {format_bytes(device_bytes)} of a device. To fix: use more devices per rank (tp, "
        "pp), a smaller capacity on more ranks, or another device_gib"
    )
    return (
        f"memory with {model.states.element_bytes}-byte numbers: {format_bytes(float(peaks[worst]))} per device at the "
        f"peak of the fullest micro-batch ({format_count(held)} tokens): {model.parts_in_words(held, shared)}"
        + (too_much if peaks[worst] > device_bytes else "")
    )


def degrees_in_words(plan: Plan, *, most: int = 8) -> str:
    """Describe shapes, widest first: ``2 over 256 ranks (64 rows x 4), 5 over 40 ranks, 3700 packs on one rank``.

    Beyond ``most`` different shapes, the smaller ones are summed up.
    """
    shared = list(shape_histogram(plan).items())
    words = [shape_in_words(*shape, count) for shape, count in shared[:most]]
    if len(shared) > most:
        rest = shared[most:]
        words.append(f"{sum(count for _, count in rest)} over {rest[-1][0][0]}-{rest[0][0][0]}")
    return ", ".join([*words, f"{int((plan.group_sizes == 1).sum())} packs on one rank"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Critical:
    """The sequence that decides the time of the longest micro-batch."""

    sequence: int
    length: int
    degree: int
    seconds: float
    share: float  # of the step


def critical_sequence(item: Planned) -> Critical:
    """Find the longest sequence of the micro-batch that takes the most time on any stage."""
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
    """Return advice with numbers, the largest loss first. If little is lost, one line says so."""
    shares = item.step.shares()
    losses: list[tuple[float, str]] = []
    if shares["ring"] > NOTICEABLE:
        losses.append((shares["ring"], _ring_advice(cost)))
    waiting = shares["dp bubble"] + shares["members"]
    if waiting > NOTICEABLE:
        losses.append((waiting, _waiting_advice(item)))
    if shares["pp bubble"] > NOTICEABLE:
        text = "the pipeline fills and drains; use fewer stages or more tokens per batch"
        losses.append((shares["pp bubble"], text))
    if shares["gradient sync"] > NOTICEABLE:
        losses.append((shares["gradient sync"], "gradients are reduced once per step; use more tokens per batch"))
    if shares["offload"] > NOTICEABLE:
        losses.append(
            (
                shares["offload"],
                "offload transfers take longer than the layers that hide them; use smaller offload ratios",
            )
        )
    losses.sort(reverse=True)
    advice = [f"{share:.0%} of the step: {text}" for share, text in losses]
    if critical.share > CRITICAL:
        advice.append(
            f"more devices help only if more than {critical.degree} ranks share sequence {critical.sequence}; the "
            "adaptive planner does that where it pays. A shorter context helps too"
        )
    elif not losses:
        advice.append(f"ranks compute {shares['compute']:.0%} of the step, so only more or faster devices would help")
    return advice


def _ring_advice(cost: CostModel) -> str:
    """Advise on ring traffic. A block takes as long as its transfer at C tokens, with a C^2 = bytes C / bandwidth."""
    rate = cost.inter_node_bytes_per_second
    tokens = cost.ring_bytes_per_token / rate / cost.attention_seconds_per_pair
    return (
        f"attention does not hide all ring traffic. A sequence hides its own from {format_count(tokens)} tokens per "
        "rank on; raise the capacity, or keep short sequences out of rings"
    )


def _waiting_advice(item: Planned) -> str:
    counts = np.diff(item.plan.rank_micro_batch_offsets)
    if counts.min() == 0:
        return f"{int((counts == 0).sum())} ranks have nothing to do; use more tokens per batch or fewer ranks"
    return "ranks wait for each other; use more tokens per batch, a smaller capacity, or another planner"
