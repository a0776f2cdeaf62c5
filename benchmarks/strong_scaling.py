"""Simulates a fixed batch on more and more ranks: where rings stop to scale, and how far grids go.

    python benchmarks/strong_scaling.py [--out FOLDER] [--seeds 3] [--models 7B ...] [--contexts 2M ...]
    python benchmarks/strong_scaling.py --unequal [--ranks 1024 2048 4096] [--models 7B] [--data github]

A batch has 32M tokens of a length distribution, cut at the context. Every model runs on 512 to 16,384 HDP ranks of the
device of the paper's case study, with the tp and pp of ``paper_assumptions.py`` and 8K tokens of capacity. The columns:

    static        DP x CP mesh of the paper, whole packs
    paper         Algorithm 2 as published
    rings         the adaptive planner, whose cost model knows no grids
    grids         the adaptive planner
    even          all compute of the batch spread evenly over the ranks, which nothing can beat

Numbers are seconds of a simulated step, means over the seeds. The benchmark prints a table, and writes
``strong_scaling.json`` and ``strong_scaling.png`` to the folder, the first of them row by row. With ``--add``, a run
that was stopped goes on.

``--unequal``: half of the ranks have half the speed, either the second half of them ("blocks") or every second node
("nodes"). The numbers are seconds of the planner's makespan for the batch of seed 0 at the longest context given, 2M by
default. Models with a pipeline are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import paper_assumptions as paper
from bytescale.common.arrays import IntArray
from bytescale.common.errors import PlanError
from bytescale.common.units import format_count, parse_count
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.data.length_distributions import sample_lengths
from bytescale.plan import Plan
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.evaluate import evaluate
from paper_tables import Setting

RANKS = (512, 1024, 2048, 4096, 8192, 16384)
CONTEXTS = ("256K", "512K", "1M", "2M", "4M")
METHODS = ("static", "paper", "rings", "grids")


def plan_of(method: str, setting: Setting, lengths: IntArray, context: int) -> Plan:
    """Return the plan of one of ``METHODS``."""
    if method in ("static", "paper"):
        return setting.plan(method, lengths, context)
    cost: CostModel = setting.cost if method == "grids" else replace(setting.cost, row_bytes_per_token=None)
    return adaptive_plan(lengths, cluster=setting.cluster, cost=cost, num_stages=setting.devices.pp)


def cell(model: paper.PaperModel, data_set: str, context: int, num_ranks: int, seeds: int) -> dict[str, Any]:
    """One row of the table: mean seconds of every method; None where a method has no plan."""
    tp, pp = model.layout(paper.CAPACITY_TOKENS)
    setting = Setting(replace(model, num_gpus=num_ranks * tp * pp), paper.CAPACITY_TOKENS)
    seconds: dict[str, list[float]] = {name: [] for name in (*METHODS, "even", "planning_ms")}
    for seed in range(seeds):
        lengths = sample_lengths(data_set, paper.BATCH_TOKENS, seed, context)
        seconds["even"].append(float(setting.cost.work_seconds(lengths).sum()) / num_ranks)
        for method in METHODS:
            started = time.perf_counter()
            try:
                plan = plan_of(method, setting, lengths, context)
            except PlanError:  # a mesh of less than one context, or a sequence that the ranks cannot hold
                continue
            if method == "grids":
                seconds["planning_ms"].append(1e3 * (time.perf_counter() - started))
            seconds[method].append(setting.seconds(plan, remote_loader=True))
    means = {name: statistics.fmean(values) if len(values) == seeds else None for name, values in seconds.items()}
    return {"model": model.name, "data": data_set, "context": context, "ranks": num_ranks, "tp": tp, "pp": pp} | means


def print_unequal(
    model: paper.PaperModel, data_set: str, context: int, ranks: list[int], sequences: int | None
) -> None:
    """Print the makespans of rings and of grids where half of the ranks have half the speed, as each is known."""
    tp, pp = model.layout(paper.CAPACITY_TOKENS)
    if pp > 1:
        return
    lengths = sample_lengths(data_set, paper.BATCH_TOKENS, 0, context)[:sequences]
    print(f"{model.name}, {data_set}, {format_count(context)}: seconds of the makespan (seconds to plan)")
    for num_ranks in ranks:
        cost = Setting(replace(model, num_gpus=num_ranks * tp), paper.CAPACITY_TOKENS).cost
        number = np.arange(num_ranks)
        slow = {"blocks": number >= num_ranks // 2, "nodes": number // cost.ranks_per_node % 2 == 1}
        shown = [f"even {float(cost.work_seconds(lengths).sum()) / 0.75 / num_ranks:.1f}"]
        for name, is_slow in slow.items():
            capacity = np.full(num_ranks, paper.CAPACITY_TOKENS)
            cluster = Cluster(capacity_tokens=capacity, speeds=np.where(is_slow, 0.5, 1.0))
            for method, known in (("rings", replace(cost, row_bytes_per_token=None)), ("grids", cost)):
                started = time.process_time()
                plan = adaptive_plan(lengths, cluster=cluster, cost=known)
                seconds = time.process_time() - started
                end = evaluate(plan, cluster=cluster, cost=cost).end_seconds
                shown.append(f"{name}: {method} {end:.1f} ({seconds:.1f})")
        print(f"{num_ranks} ranks: {', '.join(shown)}", flush=True)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print all rows."""
    table = Table(title="32M tokens, seconds of a simulated step")
    headings = (
        "model",
        "data",
        "context",
        "HDP ranks",
        *METHODS,
        "even",
        "rings / grids",
        "grids / even",
        "planning, ms",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        shown = ["-" if row[name] is None else f"{row[name]:.2f}" for name in (*METHODS, "even")]
        ratios = [_ratio(row["rings"], row["grids"]), _ratio(row["grids"], row["even"])]
        planning = "-" if row["planning_ms"] is None else f"{row['planning_ms']:.0f}"
        table.add_row(
            row["model"], row["data"], format_count(row["context"]), str(row["ranks"]), *shown, *ratios, planning
        )
    Console(width=150).print(table)


def _ratio(above: float | None, below: float | None) -> str:
    return "-" if above is None or below is None else f"{above / below:.2f}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw seconds over ranks, a panel for each model, at the longest context of github."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    longest = max(row["context"] for row in rows)
    shown = [row for row in rows if row["context"] == longest and row["data"] == rows[0]["data"]]
    names = list(dict.fromkeys(row["model"] for row in shown))
    figure, axes = plt.subplots(1, len(names), figsize=(3.2 * len(names), 3.4), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        of_model = [row for row in shown if row["model"] == name]
        for method, style in zip((*METHODS, "even"), ("s:", "^:", "o--", "o-", "k:"), strict=True):
            points = [(row["ranks"], row[method]) for row in of_model if row[method] is not None]
            axis.plot(*zip(*points, strict=True), style, label=method, markersize=4)
        axis.set(xscale="log", yscale="log", title=name, xlabel="HDP ranks")
        axis.set_xticks(RANKS[::2], [format_count(ranks) for ranks in RANKS[::2]])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("seconds of a step")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"32M tokens of {rows[0]['data']}, {format_count(longest)} context: more ranks", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [model.name for model in paper.MODELS]
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--contexts", nargs="+")
    parser.add_argument("--data", nargs="+", choices=paper.DATA_SETS, default=list(paper.DATA_SETS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--unequal", action="store_true", help="ranks of two speeds")
    parser.add_argument("--sequences", type=int, help="with --unequal: the first so many of the batch alone")
    parser.add_argument("--add", action="store_true", help="keep the rows of the folder, and add those that it lacks")
    arguments = parser.parse_args()
    models = [model for model in paper.MODELS if model.name in arguments.models]
    if arguments.unequal:
        longest = max(map(parse_count, arguments.contexts or ["2M"]))
        for model in models:
            for data_set in arguments.data:
                print_unequal(model, data_set, longest, arguments.ranks, arguments.sequences)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "strong_scaling.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if arguments.add and path.exists() else []
    known = {(row["model"], row["data"], row["context"], row["ranks"]) for row in rows}
    for model, data_set, context, num_ranks in product(
        models, arguments.data, map(parse_count, arguments.contexts or CONTEXTS), arguments.ranks
    ):
        if (model.name, data_set, context, num_ranks) in known:
            continue
        rows.append(cell(model, data_set, context, num_ranks, arguments.seeds))
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        print(f"{model.name} {data_set} {format_count(context)} {num_ranks} ranks: done", flush=True)
    rows.sort(key=lambda row: (names.index(row["model"]), row["context"], row["data"] != "github", row["ranks"]))
    print_table(rows)
    plot(rows, arguments.out / "strong_scaling.png")


if __name__ == "__main__":
    main()
