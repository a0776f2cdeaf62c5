"""``bytescale plan``: plans one batch with several planners and compares the plans."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bytescale.cli.batch_source import read_batch
from bytescale.cli.costs import CostOptions, Costs, costs_of, read_cost_options
from bytescale.cli.plan_report import Planned, memory_in_words, print_comparison, print_details
from bytescale.common.arrays import IntArray
from bytescale.common.errors import PlanError
from bytescale.common.units import format_count
from bytescale.config import PlannerName
from bytescale.plan.io import save_plan
from bytescale.plan.verify import verify
from bytescale.simulator import ClusterConfig, simulate
from bytescale.simulator.draw import draw_steps


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


def run(arguments: Sequence[str]) -> int:
    """Run ``bytescale plan``: plan, compare, print, and write the wanted files. Returns the exit code."""
    options = read_cost_options(PlanOptions, arguments, prog="bytescale plan")
    console = Console(soft_wrap=True, highlight=False)
    cluster = options.layout()
    lengths, origin, vocab_size = read_batch(options.batch, options.config.data)
    costs = costs_of(options, cluster, longest=int(lengths.max()), vocab_size=vocab_size)
    planned, refused = _plan_all(options, lengths, costs)
    ideal = float(costs.cost_model.work_seconds(lengths).sum()) / cluster.num_ranks
    chosen = list(planned)[-1]
    if options.json:
        print(json.dumps(_as_dict(planned, ideal)))
    else:
        console.print(
            f"{len(lengths)} sequences of {format_count(int(lengths.sum()))} tokens ({origin}; longest "
            f"{format_count(int(lengths.max()))}) on {cluster.num_ranks} ranks of "
            f"{format_count(costs.capacity_tokens)} tokens{devices_in_words(cluster)}; times from {costs.profile.name}"
        )
        print_comparison(console, planned, ideal)
        for name, why in refused.items():
            console.print(f"{name}: {why}")
        print_details(console, chosen, planned, costs.cost_model)
        words = memory_in_words(planned[chosen].plan, costs.memory, costs.usable_bytes)
        console.print(words)
    for written in _write_files(options, planned, chosen):
        if not options.json:
            console.print(f"wrote {written}")
    return 0


def _write_files(options: PlanOptions, planned: dict[str, Planned], chosen: str) -> list[Path]:
    """Write the files that were asked for, and return their paths."""
    if options.save is not None:
        save_plan(planned[chosen].plan, options.save)
    if options.png is not None:
        draw_steps({name: item.step for name, item in planned.items()}, options.png)
    return [path for path in (options.save, options.png) if path is not None]


def devices_in_words(cluster: ClusterConfig) -> str:
    """Describe the devices of a rank if it has more than one."""
    layout = [f"{name} {number}" for name, number in (("tp", cluster.tp), ("pp", cluster.pp)) if number > 1]
    chunks = f", {cluster.virtual_stages} chunks of layers a stage" if cluster.virtual_stages > 1 else ""
    return f" ({' x '.join(layout)} devices each{chunks})" if layout else ""


def _plan_all(options: PlanOptions, lengths: IntArray, costs: Costs) -> tuple[dict[str, Planned], dict[str, str]]:
    """Return the plan of every planner, and a reason for every planner that has none.

    For example, a static mesh does not exist for every number of ranks, and a naive plan may hang in interleaved
    stages. Raises the last planner's ``PlanError`` if no planner has a plan.
    """
    planned: dict[str, Planned] = {}
    refused: dict[str, str] = {}
    for name in options.planners:
        planner = costs.planner(name)
        began = time.perf_counter()
        try:
            plan = planner(lengths)
            seconds = time.perf_counter() - began
            verify(plan)
            step = simulate(plan, costs.checkpointed_profile, costs.cluster)
            planned[name] = Planned(plan=plan, step=step, planning_seconds=seconds)
        except PlanError as error:
            refused[name] = str(error)
            if len(refused) == len(options.planners):
                raise
    return planned, refused


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
