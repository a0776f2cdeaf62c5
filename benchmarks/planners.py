"""Compares planners in one run, on the same batches and with the same evaluation.

    python benchmarks/planners.py [--ranks 64,256,1024] [--tokens 32M] [--seeds 5] [--first-seed 3000] [--out FOLDER]

For each data set and number of ranks, it prints medians over the seeds: milliseconds to plan (CPU time of one core),
the makespan over the lower bound (with waiting for members counted), and the traffic over that of the fewest ranks. It
writes ``planners.json`` and ``planners.png``. Sequences that are too long for the whole cluster are split.

``github@9`` is github with its first bucket (up to 2K tokens) drawn from 9 tokens on, not from 512. This gives 22,600
sequences instead of 9,300.

``--cost ideal`` means work of s^2 + 24576 s and free communication, which favours no planner. The name of a profile can
be given instead. Makespans of Megatron-Core and Karmarkar-Karp leave out waiting; the latter appears only with
``ideal``. "ours in megatron" is ``bytescale.integrations.megatron``, which takes the place of Megatron's scheduler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bytescale.common.arrays import IntArray
from bytescale.common.units import parse_count
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.integrations.megatron import AdaptiveCPScheduler
from bytescale.plan.verify import verify
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import greedy_plan, naive_plan, paper_plan, static_plan
from bytescale.planner.evaluate import evaluate
from planner_batches import cost_model, sample
from planner_peers import karmarkar_karp_end, load_megatron, megatron_end

PLANNERS = {
    "adaptive": adaptive_plan,
    "greedy": greedy_plan,
    "paper": paper_plan,
    "naive": naive_plan,
    "static": static_plan,
}


def main() -> None:
    arguments = _arguments()
    megatron = load_megatron()
    if isinstance(megatron, str):
        print(f"Megatron-Core is left out: {megatron}")
    rows = []
    for data in arguments.data.split(","):
        for num_ranks in map(int, arguments.ranks.split(",")):
            rows += measure(data, num_ranks, arguments, None if isinstance(megatron, str) else megatron)
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "planners.json").write_text(json.dumps({"arguments": vars(arguments), "rows": rows}, indent=1))
    draw(rows, out / "planners.png")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="github,byted")
    parser.add_argument("--ranks", default="64,96,256,320,1000,1024,4096,16384")
    parser.add_argument("--tokens", default="32M")
    parser.add_argument("--capacity", default="8K")
    parser.add_argument("--cost", default="ideal", help="ideal, or the name of a profile")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=3000, help="seeds below 3000 were used for tuning")
    parser.add_argument("--peer-seeds", type=int, default=1, help="seeds for the slow peers")
    parser.add_argument("--peer-repeats", type=int, default=1, help="timings of each plan; the best one counts")
    parser.add_argument("--megatron-max-ranks", type=int, default=1024, help="above, it takes minutes")
    parser.add_argument("--only", default="", help="comma-separated planners")
    parser.add_argument("--out", default="benchmarks/out")
    return parser.parse_args()


def measure(data: str, num_ranks: int, arguments: argparse.Namespace, megatron: Any) -> list[dict[str, Any]]:
    """Return one row per planner with medians over the seeds. Rows are printed as they come."""
    capacity = parse_count(arguments.capacity)
    cost = cost_model(arguments.cost)
    cluster = Cluster.uniform(num_ranks, capacity)
    batches = [
        sample(data, parse_count(arguments.tokens), seed, min(num_ranks * capacity, 2**21))
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    ]
    wanted = (
        arguments.only.split(",") if arguments.only else [*PLANNERS, "megatron", "ours in megatron", "karmarkar-karp"]
    )
    rows = []
    for name in wanted:
        if name in PLANNERS:
            runs = [_run(PLANNERS[name], lengths, cluster, cost) for lengths in batches]
        elif not _peer_runs(name, num_ranks, arguments, megatron):
            continue
        else:
            runs = [
                _run_peer(name, megatron, lengths, num_ranks, capacity, cost, arguments.peer_repeats)
                for lengths in batches[: arguments.peer_seeds]
            ]
        row: dict[str, Any] = {"data": data, "ranks": num_ranks, "planner": name, "sequences": len(batches[0])}
        for key in runs[0]:
            values = [run[key] for run in runs]
            row[key] = statistics.median(values)
            row[f"worst_{key}"] = max(values)
        rows.append(row)
        print(_line(row), flush=True)
    return rows


def _peer_runs(name: str, num_ranks: int, arguments: argparse.Namespace, megatron: Any) -> bool:
    """Return whether a peer can plan. Megatron-Core rounds to powers of two and can fail for other numbers of ranks."""
    if name == "karmarkar-karp":
        return bool(arguments.cost == "ideal")
    power_of_two = num_ranks & (num_ranks - 1) == 0
    return name != "megatron" or (megatron is not None and num_ranks <= arguments.megatron_max_ranks and power_of_two)


def _run(planner: Callable[..., Any], lengths: IntArray, cluster: Cluster, cost: CostModel) -> dict[str, float]:
    """Return the best of three timings, because the machine is shared."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        plan = planner(lengths, cluster=cluster, cost=cost)
        seconds.append(time.process_time() - start)
    start = time.process_time()
    verify(plan)
    verify_seconds = time.process_time() - start
    outcome = evaluate(plan, cluster=cluster, cost=cost)
    return {
        "milliseconds": 1e3 * min(seconds),
        "end_over_ideal": outcome.over_ideal,
        "traffic_over_fewest": outcome.traffic_tokens / max(outcome.minimal_traffic_tokens, 1),
        "verify_milliseconds": 1e3 * verify_seconds,
    }


def _run_peer(
    name: str, megatron: Any, lengths: IntArray, num_ranks: int, capacity: int, cost: CostModel, repeats: int
) -> dict[str, float]:
    work = cost.work_seconds(lengths)
    ideal = float(work.sum()) / num_ranks
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        if name == "megatron":
            end, without_barriers = megatron_end(megatron.BalancedCPScheduler, lengths, cost, num_ranks, capacity)
        elif name == "ours in megatron":
            scheduler = partial(AdaptiveCPScheduler, cost=cost)
            end, without_barriers = megatron_end(scheduler, lengths, cost, num_ranks, capacity)
        else:
            end, _ = karmarkar_karp_end(lengths, work, num_ranks, capacity)
            without_barriers = end
        seconds.append(time.process_time() - start)
    return {
        "milliseconds": 1e3 * min(seconds),
        "end_over_ideal": end / ideal,
        "end_without_barriers_over_ideal": without_barriers / ideal,
    }


def _line(row: dict[str, Any]) -> str:
    text = (
        f"{row['data']:7} {row['ranks']:6} ranks  {row['planner']:15} {row['milliseconds']:10.1f} ms "
        f"(worst {row['worst_milliseconds']:.1f})   "
        f"end / ideal {row['end_over_ideal']:7.3f} (worst {row['worst_end_over_ideal']:7.3f})"
    )
    if "traffic_over_fewest" in row:
        text += f"   traffic {row['traffic_over_fewest']:6.3f} (worst {row['worst_traffic_over_fewest']:.3f})"
        text += f"   verify {row['verify_milliseconds']:.1f} ms"
    elif row["end_without_barriers_over_ideal"] != row["end_over_ideal"]:
        text += f"   without its barriers {row['end_without_barriers_over_ideal']:.3f}"
    return text


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw planning time and quality over the number of ranks, one column per data set."""
    try:
        import matplotlib
    except ImportError:
        print('No plot: matplotlib is not installed; pip install "bytescale[plot]"')
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    sets = sorted({row["data"] for row in rows}, reverse=True)
    figure, axes = pyplot.subplots(2, len(sets), figsize=(6 * len(sets), 8), sharex=True, squeeze=False)
    for column, data in enumerate(sets):
        for key, label, axis in (
            ("milliseconds", "planning time, ms", axes[0, column]),
            ("end_over_ideal", "end / all work spread evenly", axes[1, column]),
        ):
            for name in dict.fromkeys(row["planner"] for row in rows):
                points = [(row["ranks"], row[key]) for row in rows if row["planner"] == name and row["data"] == data]
                if points:
                    axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
            axis.set(xscale="log", yscale="log", ylabel=label, title=data)
            axis.grid(alpha=0.3)
        axes[1, column].set_xlabel("ranks")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
