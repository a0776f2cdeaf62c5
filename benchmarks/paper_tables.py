"""Reproduces the tables of the paper's section 8 by simulation, and shows them beside the published numbers.

    python benchmarks/paper_tables.py [--out FOLDER] [--batches 16] [--only-2m] [--capacity-tokens 8192]

It simulates the planners static, naive (Algorithm 1), paper (Algorithm 2), adaptive with rings only, and adaptive with
grids, for every model, context and data set, and the ablation of the 7B case. ``paper_assumptions.py`` has an
assumption for everything that the paper leaves open. No number here is tuned. The benchmark prints tables and writes
``paper_tables.json`` and ``paper_tables.png`` to the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import paper_assumptions as paper
from bytescale.common.arrays import IntArray
from bytescale.common.units import format_count
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.cost.offload_rule import OffloadRule
from bytescale.cost.profile import Profile
from bytescale.data.length_distributions import sample_lengths
from bytescale.plan import Plan
from bytescale.plan.plan import concatenated_ranges
from bytescale.planner.adaptive.aligned import align
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import naive_plan, paper_plan
from bytescale.planner.draft import Draft, assemble
from bytescale.simulator import ClusterConfig, simulate

PLANNERS = ("static", "naive", "paper", "rings", "adaptive")
"""``rings`` is the adaptive planner whose cost model knows no grids: it shares sequences as the paper does."""
CASE = "7B"
WITHIN = 0.20


class Setting:
    """A model and its cluster, in the form that planners and the simulator take."""

    def __init__(self, model: paper.PaperModel, capacity_tokens: int) -> None:
        self.model = model
        self.capacity_tokens = capacity_tokens
        tp, pp = model.layout(capacity_tokens)
        self.profile: Profile = model.profile(tp)
        self.devices = ClusterConfig(
            num_gpus=model.num_gpus,
            gpus_per_node=paper.GPUS_PER_NODE,
            tp=tp,
            pp=pp,
        )
        per_node = self.devices.ranks_per_node
        self.cluster = Cluster.uniform(self.devices.num_ranks, capacity_tokens)
        self.cost: CostModel = self.profile.cost_model(ranks_per_node=per_node, pipeline_parallel=pp)
        self.sync_hidden = 1.0 - pp / model.spec.num_layers
        """Share of the gradient sync that runs beside computation in the published system."""
        self.loader_seconds = paper.LOADER_NODE_SECONDS * paper.GPUS_PER_NODE / model.num_gpus

    def plan(self, planner: str, lengths: IntArray, context: int) -> Plan:
        """Return the plan of one of ``PLANNERS``, which gets its own form of the batch (``Batch.for_planner``)."""
        if planner == "static":
            return self.static_mesh(lengths, context)
        if planner == "naive":
            return self.algorithm_1(lengths, offload=False)
        if planner == "paper":
            return paper_plan(lengths, cluster=self.cluster, cost=self.cost, pipeline=self.devices.pp > 1)
        cost = self.cost if planner == "adaptive" else replace(self.cost, row_bytes_per_token=None)
        return adaptive_plan(lengths, cluster=self.cluster, cost=cost, num_stages=self.devices.pp)

    def static_mesh(self, lengths: IntArray, context: int) -> Plan:
        """Fill packs of exactly one context with ``lengths`` in order, and deal them to the mesh's rows in turn."""
        cp = context // self.capacity_tokens
        pack = (np.cumsum(lengths) - lengths) // context
        counts = np.bincount(pack)
        number, degrees = np.arange(len(counts)), np.full(len(counts), cp)
        first = number % (self.devices.num_ranks // cp) * cp
        draft = Draft(
            sequences=np.arange(len(lengths)),
            sequence_counts=counts,
            ranks=concatenated_ranges(first, first + degrees),
            degrees=degrees,
            slots=number,
        )
        return assemble(draft, lengths=lengths, cluster=self.cluster, planner=f"static/cp{cp}")

    def algorithm_1(self, lengths: IntArray, *, offload: bool) -> Plan:
        """Return the plan of Algorithm 1 with Eq. 3, or with an offload ratio of 0."""
        layers = self.model.spec.num_layers
        rule = OffloadRule(
            profile=self.profile, num_layers=layers, movable_share=(layers - 2) / layers, host_bytes=paper.HOST_BYTES
        )
        return naive_plan(lengths, cluster=replace(self.cluster, offload=rule if offload else None))

    def seconds(self, plan: Plan, *, remote_loader: bool, recompute: bool = False) -> float:
        """Return the simulated step time in seconds. A remote loader works beside the step before."""
        if self.devices.pp > 1:
            plan = align(plan, cluster=self.cluster, cost=self.cost)
        profile = replace(self.profile, checkpointing="full" if recompute else "none")
        step = simulate(plan, profile, self.devices)
        sync = (1.0 - self.sync_hidden) * step.sync_seconds[0]
        seconds = max(step.timeline.end[:, p :: self.devices.pp].max() + sync[p] for p in range(self.devices.pp))
        return seconds + (max(0.0, self.loader_seconds - seconds) if remote_loader else self.loader_seconds)


@dataclass(frozen=True, slots=True)
class Batch:
    """One global batch of a shuffled corpus."""

    whole: IntArray  # its documents
    filled: IntArray  # for the static mesh: the same stream, cut where a context is full

    def for_planner(self, planner: str) -> IntArray:
        """Return the lengths that a planner is given."""
        return self.filled if planner == "static" else self.whole


def stream(data_set: str, context: int, num_batches: int) -> list[Batch]:
    """Cut ``num_batches`` consecutive batches from a stream. If it ends early, the static mesh repeats a step."""
    lengths = sample_lengths(data_set, num_batches * paper.BATCH_TOKENS, paper.SEED, context)
    ends = np.cumsum(lengths)
    batch_of = np.minimum((ends - lengths) // paper.BATCH_TOKENS, num_batches - 1)
    whole = np.split(lengths, np.searchsorted(batch_of, np.arange(1, num_batches)))
    num_steps = int(ends[-1] // paper.BATCH_TOKENS)
    edges = np.union1d(np.append(0, ends), np.arange(0, ends[-1], context))
    edges = edges[edges <= num_steps * paper.BATCH_TOKENS]
    cuts = np.searchsorted(edges, np.arange(1, num_steps) * paper.BATCH_TOKENS)
    filled = np.split(np.diff(edges), cuts)
    return [Batch(batch, filled[number % num_steps]) for number, batch in enumerate(whole)]


def speed_ups(
    capacity_tokens: int, contexts: Sequence[int], num_batches: int, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return one row per model, context and data set, with the mean step seconds of every planner."""
    rows = []
    for model in paper.MODELS:
        setting = Setting(model, capacity_tokens)
        for data_set in paper.DATA_SETS:
            for context in contexts:
                report(f"{model.name} {data_set} {format_count(context)}")
                batches = stream(data_set, context, num_batches if context == paper.CONTEXTS[-1] else num_batches // 4)
                row: dict[str, Any] = {"model": model.name, "data_set": data_set, "context": context}
                row |= {"tp": setting.devices.tp, "pp": setting.devices.pp, "ranks": setting.devices.num_ranks}
                for planner in PLANNERS:
                    times = [
                        setting.seconds(
                            setting.plan(planner, batch.for_planner(planner), context),
                            remote_loader=planner != "static",
                            recompute=planner == "static",
                        )
                        for batch in batches
                    ]
                    row[planner] = float(np.mean(times))
                rows.append(row)
    return rows


def ablation(capacity_tokens: int, num_batches: int) -> dict[str, float]:
    """Return the mean step seconds of the 7B, 2M, byted case as one part after the other is switched on."""
    setting = Setting(next(model for model in paper.MODELS if model.name == CASE), capacity_tokens)
    context = paper.CONTEXTS[-1]
    totals: dict[str, list[float]] = {}
    for batch in stream("byted", context, num_batches):
        lengths = batch.whole
        balanced = setting.plan("paper", lengths, context)
        adaptive = setting.plan("adaptive", lengths, context)
        naive = setting.algorithm_1(lengths, offload=False)
        steps = (  # (step, plan, loader is remote, activations are recomputed)
            ("static", setting.static_mesh(batch.filled, context), False, True),
            ("dynamic communication", naive, False, True),
            ("offloading", naive, False, False),
            ("offloading, fewest ranks by Eq. 3", setting.algorithm_1(lengths, offload=True), False, False),
            ("balance", balanced, False, False),
            ("remote loader", balanced, True, False),
            ("adaptive instead of Algorithm 2", adaptive, True, False),
        )
        for name, plan, remote, recompute in steps:
            seconds = setting.seconds(plan, remote_loader=remote, recompute=recompute)
            totals.setdefault(name, []).append(seconds)
    return {name: float(np.mean(seconds)) for name, seconds in totals.items()}


def doubling_slopes(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return by how much a doubling of the context multiplies the step time (geometric mean; 7B, github)."""
    mine = [row for row in rows if row["model"] == CASE and row["data_set"] == "github"]
    doublings = np.log2(mine[-1]["context"] / mine[0]["context"]) or 1.0
    return {planner: float((mine[-1][planner] / mine[0][planner]) ** (1 / doublings)) for planner in PLANNERS}


def print_tables(console: Console, rows: list[dict[str, Any]], steps: dict[str, float]) -> None:
    """Print all tables. "ok" marks numbers within 20 % of the published ones."""
    table = Table(title="Speed-up over the static mesh")
    for name in ("model", "tp", "pp", "ranks", "data", "context", "static s", "naive", "paper", "rings", "adaptive"):
        table.add_column(name, justify="right")
    table.add_column("published", justify="right")
    table.add_column("paper / published", justify="right")
    for row in rows:
        ratios = [f"{row['static'] / row[name]:.2f}" for name in PLANNERS[1:]]
        published = _published(row)
        table.add_row(
            row["model"],
            *(str(row[name]) for name in ("tp", "pp", "ranks", "data_set")),
            format_count(row["context"]),
            f"{row['static']:.1f}",
            *ratios,
            f"{published:.2f}" if published else "",
            _verdict(row["static"] / row["paper"] / published) if published else "",
        )
    console.print(table)
    table = Table(title="Ablation: 7B, 2M, byted, 1024 GPUs")
    for name in ("with", "step s", "speed-up", "published", "ours / published"):
        table.add_column(name, justify="right")
    for name, seconds in steps.items():
        ours, published = steps["static"] / seconds, paper.ABLATION.get(name)
        verdict = _verdict(ours / published) if published else ""
        table.add_row(name, f"{seconds:.1f}", f"{ours:.2f}", str(published or ""), verdict)
    console.print(table)
    table = Table(title="Case study: 7B, 2M, byted, 1024 GPUs, seconds a step")
    for name in ("plan", "ours", "published", "ours / published"):
        table.add_column(name, justify="right")
    case = next(row for row in rows if _is_case(row))
    for name, published in paper.CASE_STUDY_SECONDS.items():
        table.add_row(name, f"{case[name]:.0f}", f"{published:.0f}", _verdict(case[name] / published))
    console.print(table)
    if len({row["context"] for row in rows}) == 1:
        return
    slopes = doubling_slopes(rows)
    table = Table(title="Step time per doubling of the context, 7B, github")
    for name in ("planner", "ours", "published"):
        table.add_column(name, justify="right")
    for name in PLANNERS:
        table.add_row(name, f"{slopes[name]:.2f}", str(paper.SLOW_DOWN_PER_DOUBLING.get(name, "")))
    console.print(table)


def _published(row: dict[str, Any]) -> float | None:
    at_2m = row["context"] == paper.CONTEXTS[-1]
    return paper.SPEED_UPS[row["data_set"]].get(row["model"]) if at_2m else None


def _is_case(row: dict[str, Any]) -> bool:
    return (row["model"], row["data_set"], row["context"]) == (CASE, "byted", paper.CONTEXTS[-1])


def _verdict(ratio: float) -> str:
    return f"{ratio:.2f}" + (" ok" if 1 - WITHIN <= ratio <= 1 + WITHIN else " MISSED")


def plot(rows: list[dict[str, Any]], steps: dict[str, float], path: Path) -> None:
    """Draw the speed-ups at 2M per model and data set, and the ablation, beside the published numbers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(16, 4.6), layout="constrained", width_ratios=(6, 6, 5))
    names = [model.name for model in paper.MODELS]
    bars = ("naive", "paper", "rings", "adaptive", "published")
    colours = {
        "naive": "#c9d6e2",
        "paper": "#7fa8cc",
        "rings": "#4a84b5",
        "adaptive": "#1f4f82",
        "published": "#e08a3c",
    }
    for axis, data_set in zip(axes, paper.DATA_SETS, strict=False):
        at_2m = {row["model"]: row for row in rows if row["data_set"] == data_set and row["context"] == 2**21}
        for place, name in enumerate(bars):
            heights = [
                (_published(at_2m[model]) or np.nan)
                if name == "published"
                else at_2m[model]["static"] / at_2m[model][name]
                for model in names
            ]
            shown = axis.bar(np.arange(len(names)) + 0.16 * (place - 2), heights, 0.16, label=name, color=colours[name])
            axis.bar_label(shown, fmt="%.1f", fontsize=7)
        axis.set_xticks(np.arange(len(names)), names)
        axis.set_title(f"Speed-up over static, 2M context, {data_set}", fontsize=10)
        axis.legend(fontsize=8)
    stages = list(steps)
    for place, (label, colour) in enumerate((("ours", "#1f5f99"), ("published", "#e08a3c"))):
        heights = [
            steps["static"] / steps[name]
            if label == "ours"
            else paper.ABLATION.get(name, 1.0 if name == "static" else np.nan)
            for name in stages
        ]
        shown = axes[2].barh(np.arange(len(stages)) + 0.38 * (place - 0.5), heights, 0.38, label=label, color=colour)
        axes[2].bar_label(shown, fmt="%.2f", fontsize=7)
    axes[2].set_yticks(np.arange(len(stages)), stages, fontsize=8)
    axes[2].invert_yaxis()
    axes[2].set_title("Ablation: 7B, 2M, byted", fontsize=10)
    axes[2].legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--batches", type=int, default=paper.BATCHES, help="at 2M; a quarter of them at other contexts")
    parser.add_argument("--capacity-tokens", type=int, default=paper.CAPACITY_TOKENS, help="another assumption to try")
    parser.add_argument("--only-2m", action="store_true", help="leave out the shorter contexts")
    arguments = parser.parse_args()
    console = Console(width=150)
    began = time.perf_counter()
    contexts = paper.CONTEXTS[-1:] if arguments.only_2m else paper.CONTEXTS
    capacity, batches = arguments.capacity_tokens, arguments.batches
    rows = speed_ups(
        capacity, contexts, batches, lambda text: print(f"\r{text:30}", end="", file=sys.stderr, flush=True)
    )
    print(file=sys.stderr)
    steps = ablation(capacity, batches)
    print_tables(console, rows, steps)
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = {"speed_ups": rows, "ablation_seconds": steps, "slow_down_per_doubling": doubling_slopes(rows)}
    (arguments.out / "paper_tables.json").write_text(json.dumps(content, indent=1))
    plot(rows, steps, arguments.out / "paper_tables.png")
    console.print(f"{time.perf_counter() - began:.0f} s; JSON and PNG in {arguments.out}")


if __name__ == "__main__":
    main()
