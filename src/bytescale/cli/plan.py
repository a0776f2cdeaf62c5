"""``bytescale plan``: plans one batch with several planners, compares the plans, and says what would help."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from bytescale.cli.costs import CostOptions, Costs, costs_of, read_batch, read_cost_options
from bytescale.common.arrays import IntArray
from bytescale.common.errors import PlanError
from bytescale.common.units import format_bytes, format_count, format_seconds
from bytescale.config.schema import PlannerName
from bytescale.cost.model import CostModel
from bytescale.plan import Plan
from bytescale.plan.io import save_plan
from bytescale.plan.slices import micro_batch_tokens
from bytescale.plan.summary import gist
from bytescale.planner.evaluate import evaluate
from bytescale.planner.prefixes import Prefixes, cost_of_trees, plan_prefixes
from bytescale.simulator import SimulatedStep
from bytescale.simulator.draw import draw_steps
from bytescale.train.reporting.screen import Console, console_of

NOTICEABLE = 0.05  # share of the step from which a loss is reported
CRITICAL = 0.8  # share of the step from which one sequence is said to decide the step time


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(CostOptions):
    """Plan one batch: bytescale plan [CONFIG.toml] [options].

    With a config, the batch comes from its corpus and the ranks are its ranks. Without one, the batch comes from
    --batch.lengths FILE, or from a length distribution of the paper.
    """

    planners: tuple[PlannerName, ...] = ("static", "naive", "paper", "adaptive")
    """Planners to compare. Details are shown for the last one."""
    png: Path | None = None
    """Draw all ranks over time, one panel per planner, into this file."""
    save: Path | None = None
    """Write the plan of the last planner to this .npz file."""
    json: bool = False
    """Print JSON instead of tables."""


class Planned(NamedTuple):
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


def run(arguments: Sequence[str]) -> int:
    """Run ``bytescale plan``: plan, compare, print, and write the wanted files. Returns the exit code."""
    options = read_cost_options(PlanOptions, arguments, prog="bytescale plan")
    console = console_of(quiet=options.json)
    lengths, origin, vocab_size, trajectories, pictures = read_batch(options.batch, options.config.data)
    costs = costs_of(options, longest=int(lengths.max()), vocab_size=vocab_size, pictures=pictures)
    cluster = costs.cluster
    planned, refused = _plan_all(options, lengths, costs)
    ideal = float(costs.cost_model.work_seconds(lengths).sum()) / cluster.num_ranks
    ideal += sum(float(own.mean()) for own in costs.encoders)
    chosen = list(planned)[-1]
    saved = saved_by_prefixes(trajectories, costs) if trajectories else {}
    if options.json:
        print(json.dumps({**_as_dict(planned, ideal), **({"shared_prefixes": saved} if saved else {})}))
    layout = [f"{name} {number}" for name, number in (("tp", cluster.tp), ("pp", cluster.pp)) if number > 1]
    devices = f" ({' x '.join(layout)} devices each)" if layout else ""
    console.print(
        f"{len(lengths)} sequences of {format_count(int(lengths.sum()))} tokens ({origin}; longest "
        f"{format_count(int(lengths.max()))}) on {cluster.num_ranks} ranks of "
        f"{format_count(costs.capacity_tokens)} tokens{devices}; times from {costs.profile.name}"
    )
    _print_comparison(console, planned, ideal)
    for name, why in refused.items():
        console.print(f"{name}: {why}")
    _print_details(console, chosen, planned, costs.cost_model)
    if saved:
        console.print(
            f"  shared prefixes: {saved['rows']} rows in the place of {saved['tokens']} tokens; ranks end after "
            f"{format_seconds(saved['seconds'])} instead of {format_seconds(saved['seconds_apart'])}, "
            f"{saved['seconds_apart'] / saved['seconds']:.2f}x as fast"
        )
    console.print(memory_in_words(planned[chosen].plan, costs))
    if options.save is not None:
        save_plan(planned[chosen].plan, options.save)
        console.print(f"wrote {options.save}")
    if options.png is not None:
        draw_steps({name: item.step for name, item in planned.items()}, options.png)
        console.print(f"wrote {options.png}")
    return 0


def _plan_all(options: PlanOptions, lengths: IntArray, costs: Costs) -> tuple[dict[str, Planned], dict[str, str]]:
    """Return the plan of every planner, and a reason for every one that has none, such as that no static mesh exists.

    Raises the last planner's ``PlanError`` if no planner has a plan.
    """
    planned: dict[str, Planned] = {}
    refused: dict[str, str] = {}
    for name in options.planners:
        planner = costs.planner(name)
        began = time.perf_counter()
        try:
            plan = planner(lengths)
            seconds = time.perf_counter() - began
            planned[name] = Planned(plan, costs.simulated(plan), seconds)
        except PlanError as error:
            refused[name] = str(error)
            if len(refused) == len(options.planners):
                raise
    return planned, refused


def saved_by_prefixes(trajectories: Sequence[IntArray], costs: Costs) -> dict[str, float]:
    """Tokens, the rows that ``share_prefixes`` computes (labels are the next tokens), and the makespans of both plans.

    In a pipeline, they are those of one stage.
    """
    rows = [np.stack([own, np.append(own[1:], -1)], axis=1).tobytes() for own in trajectories]
    planner = replace(costs.planner("adaptive"), num_stages=1)
    prefixes = Prefixes.of(rows, 2 * trajectories[0].itemsize)
    plan, forest = plan_prefixes(planner, prefixes)
    apart = planner(prefixes.lengths)
    ends = [
        evaluate(one, cluster=costs.ranks, cost=cost_of_trees(planner.cost, trees)).end_seconds
        for one, trees in ((plan, forest), (apart, None))
    ]
    return {"tokens": apart.num_tokens, "rows": plan.num_tokens, "seconds": ends[0], "seconds_apart": ends[1]}


def _as_dict(planned: dict[str, Planned], ideal_seconds: float) -> dict[str, object]:
    rows = {
        name: {
            "step_seconds": item.step.step_seconds,
            "imbalance": item.imbalance,
            "waiting": item.waiting,
            "ring_bytes": item.ring_bytes,
            "planning_seconds": item.planning_seconds,
            "shares": item.step.shares(),
        }
        for name, item in planned.items()
    }
    return {"ideal_seconds": ideal_seconds, "planners": rows}


def _print_comparison(console: Console, planned: dict[str, Planned], ideal_seconds: float) -> None:
    """Print one row per planner. ``ideal_seconds``: the time if ranks only computed, all equally much."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("planner", no_wrap=True)
    columns = ("step", "vs\nstatic", "vs\nideal", "slowest\n/ mean", "ring\nexposed", "ranks\nwait", "ring\nbytes")
    for name in (*columns, "planned\nin"):
        table.add_column(name, justify="right", no_wrap=True)
    base = planned["static"].step.step_seconds if "static" in planned else None
    for name, item in planned.items():
        seconds = item.step.step_seconds
        table.add_row(
            name,
            format_seconds(seconds),
            f"{base / seconds:.2f}x" if base else "",
            f"{seconds / ideal_seconds:.2f}x",
            f"{item.imbalance:.2f}",
            f"{item.step.shares()['ring']:.1%}",
            f"{item.waiting:.1%}",
            format_bytes(item.ring_bytes),
            format_seconds(item.planning_seconds),
        )
    console.print(table, soft_wrap=False)
    console.print(f"ideal: {format_seconds(ideal_seconds)}, if all compute were spread evenly over the ranks")


def _print_details(console: Console, name: str, planned: dict[str, Planned], cost: CostModel) -> None:
    """Print details of one planner: the plan, bytes saved, the sequence that decides the time, and what would help."""
    item = planned[name]
    console.print(f"\n{name}", style="bold")
    console.print(f"  {gist(item.plan)}")
    if "static" in planned and planned["static"].ring_bytes > 0:
        saved = 1 - item.ring_bytes / planned["static"].ring_bytes
        console.print(f"  ring bytes saved compared with static: {saved:.1%}")
    sequence, degree, seconds = _critical_sequence(item)
    share = seconds / item.step.step_seconds
    if encoders := [float(own.max()) for own in item.step.encoders]:
        before, behind = map(format_seconds, encoders)
        console.print(
            f"  pictures: {before} of encoders before the text and {behind} behind it, "
            f"{sum(encoders) / item.step.step_seconds:.0%} of the step"
        )
    console.print(
        f"  critical sequence: number {sequence}, {format_count(int(item.plan.lengths[sequence]))} tokens over "
        f"{degree} rank{'s' if degree > 1 else ''}, {format_seconds(seconds)}, {share:.0%} of the step"
    )
    lines = [f"{lost:.0%} of the step: {text}" for lost, text in _losses(item, cost)]
    if share > CRITICAL:
        lines.append(
            f"more devices help only if more than {degree} ranks share sequence {sequence}; the adaptive planner does "
            "that where it pays. A shorter context helps too"
        )
    elif not lines:
        compute = item.step.shares()["compute"]
        lines.append(f"ranks compute {compute:.0%} of the step, so only more or faster devices would help")
    console.print("  what would help:", *lines, sep="\n    - ")


def _critical_sequence(item: Planned) -> tuple[int, int, float]:
    """The longest sequence of the micro-batch that takes the most time on any stage, its ranks, and that time."""
    plan, events = item.plan, item.step.events
    seconds = item.step.stage_event_seconds.max(axis=1)
    event = int(seconds.argmax())
    groups = plan.groups_of(int(events.member_micro_batches[events.member_offsets[event]]))
    inside = np.concatenate([plan.sequences_of(int(group)) for group in groups])
    return int(inside[plan.lengths[inside].argmax()]), int(plan.group_sizes[groups[0]]), float(seconds[event])


def _losses(item: Planned, cost: CostModel) -> list[tuple[float, str]]:
    shares, counts = item.step.shares(), np.diff(item.plan.rank_micro_batch_offsets)
    # A block takes as long as its transfer at C tokens, with a C^2 = bytes C / bandwidth.
    hides = cost.ring_bytes_per_token / cost.inter_node_bytes_per_second / cost.attention_seconds_per_pair
    idle = f"{int((counts == 0).sum())} ranks have nothing to do; use more tokens per batch or fewer ranks"
    late = "ranks wait for each other; use more tokens per batch, a smaller capacity, or another planner"
    stages = "the pipeline fills and drains; use fewer stages or more tokens per batch"
    if item.plan.domain > 1:
        stages = "rounds wait for gathers of parameters and for the slowest rank; raise the capacity, make the domain "
        stages += 'smaller, or set parallel.experts to "parallel" for a mixture'
    found = [
        (
            shares["ring"],
            "attention does not hide all ring traffic. A sequence hides its own from "
            f"{format_count(hides)} tokens per rank on; raise the capacity, or keep short sequences out of rings",
        ),
        (shares["dp bubble"] + shares["members"], late if counts.min() else idle),
        (shares["pp bubble"], stages),
        (shares["gradient sync"], "gradients are reduced once per step; use more tokens per batch"),
        (shares["offload"], "offload transfers take longer than the layers that hide them; use smaller offload ratios"),
    ]
    return sorted((one for one in found if one[0] > NOTICEABLE), reverse=True)


def memory_in_words(plan: Plan, costs: Costs) -> str:
    """Describe the peak memory of the fullest micro-batch by its parts, and whether a device has as much."""
    tokens, model, device_bytes = micro_batch_tokens(plan), costs.memory, costs.usable_bytes
    peaks = model.limits().device_peak(tokens.held, tokens.offloaded, tokens.shared, tokens.row)
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
