"""Twelve shapes of batches on 64 to 16,384 ranks: how late plans end, and how long they take to make.

A 7B model on assumed H100s, 8K tokens a rank. *even* is all compute spread evenly; with messages no plan may reach it.
``python benchmarks/planner_suite.py [--ranks 64 1024 4096 16384] [--shapes equal ...] [--free]``
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.config.presets import PRESETS
from bytescale.cost.assumed import MeshCosts
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.data.length_distributions import sample_lengths
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.evaluate import evaluate
from bytescale.train.parts.describe import spec_of_content

CAPACITY = 8192
CONTEXT = 2**18

Shape = Callable[[int, np.random.Generator], IntArray]
SHAPES: dict[str, Shape] = {
    "equal": lambda ranks, random: np.full(4 * ranks, CAPACITY),
    "equal +- 1": lambda ranks, random: CAPACITY - 1 + random.integers(-1, 2, 4 * ranks),
    "R + 1": lambda ranks, random: np.full(ranks + 1, CAPACITY),
    "bimodal": lambda ranks, random: np.repeat([8 * CAPACITY, CAPACITY // 8], [max(1, ranks // 8), 16 * ranks]),
    "uniform": lambda ranks, random: random.integers(CAPACITY, 4 * CAPACITY, ranks // 2),
    "lognormal": lambda ranks, random: np.minimum(random.lognormal(7, 1.5, 4 * ranks).astype(int) + 1, CONTEXT // 4),
    "one giant": lambda ranks, random: np.append(np.full(2 * ranks, CAPACITY // 2), min(CONTEXT, ranks * CAPACITY)),
    "all tiny": lambda ranks, random: np.full(61 * ranks, 32),
    "github": lambda ranks, random: sample_lengths("github", 4 * ranks * CAPACITY, 50, CONTEXT),
    "byted": lambda ranks, random: sample_lengths("byted", 4 * ranks * CAPACITY, 50, CONTEXT),
    "C multiples +- 1": lambda ranks, random: CAPACITY * random.integers(1, 5, ranks) + random.integers(-1, 2, ranks),
    "few tokens": lambda ranks, random: np.minimum(random.lognormal(6, 1, ranks).astype(int) + 1, CAPACITY),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 4096, 16384])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--free", action="store_true", help="messages take no time")
    given = parser.parse_args(arguments)
    cost = MeshCosts(kind="cuda", bytes_per_element=2).assumed(spec_of_content(PRESETS["7b"]))
    if given.free:
        cost = CostModel.from_work(linear_per_square=24576)
    print(f"{'shape':18}{'ranks':>7}{'sequences':>11}{'step s':>9}{'over even':>11}{'planned in s':>14}")
    for name in given.shapes:
        for ranks in given.ranks:
            lengths = SHAPES[name](ranks, np.random.default_rng(ranks))
            cluster = Cluster.uniform(ranks, CAPACITY)
            began = time.process_time()
            plan = adaptive_plan(lengths, cluster=cluster, cost=cost)
            seconds = time.process_time() - began
            end = evaluate(plan, cluster=cluster, cost=cost).end_seconds
            even = float(cost.work_seconds(lengths).sum()) / ranks
            print(f"{name:18}{ranks:7}{len(lengths):11}{end:9.3f}{end / even:11.3f}{seconds:14.3f}", flush=True)


if __name__ == "__main__":
    main()
