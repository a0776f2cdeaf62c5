"""Measures how many times faster the adaptive planner is than Megatron-Core's scheduler, batch by batch.

    python benchmarks/planner_ratio.py [--data github,byted,github@9] [--ranks 1024] [--seeds 5] [--first-seed 3000]

On a shared machine, times change by a factor of two within minutes. Therefore ours runs 15 times before Megatron's one
run on the same batch, and 15 times after it. The median and the best of ours are compared with that one run. All times
are CPU times of one core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from bytescale.cost.cluster import Cluster
from bytescale.planner.adaptive.planner import adaptive_plan
from planner_batches import cost_model, sample
from planner_peers import load_megatron, megatron_end

NUM_TOKENS, CAPACITY, REPEATS = 2**25, 8192, 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="github,byted,github@9")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=3000)
    arguments = parser.parse_args()
    megatron = load_megatron()
    if isinstance(megatron, str):
        raise SystemExit(f"Megatron-Core is {megatron}")
    for data in arguments.data.split(","):
        ratios = [
            compare(megatron, data, arguments.ranks, seed)
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        ]
        of_median, of_best = (statistics.median(part) for part in zip(*ratios, strict=True))
        print(f"{data}, median over seeds: {of_median:.0f} times by our median, {of_best:.0f} by our best", flush=True)


def compare(megatron: Any, data: str, num_ranks: int, seed: int) -> tuple[float, float]:
    """Return Megatron's time over our median and over our best."""
    lengths = sample(data, NUM_TOKENS, seed, min(num_ranks * CAPACITY, 2**21))
    cost, cluster = cost_model("ideal"), Cluster.uniform(num_ranks, CAPACITY)
    ours = [_milliseconds(lambda: adaptive_plan(lengths, cluster=cluster, cost=cost)) for _ in range(REPEATS)]
    theirs = _milliseconds(lambda: megatron_end(megatron.BalancedCPScheduler, lengths, cost, num_ranks, CAPACITY))
    ours += [_milliseconds(lambda: adaptive_plan(lengths, cluster=cluster, cost=cost)) for _ in range(REPEATS)]
    middle, best = statistics.median(ours), min(ours)
    print(
        f"{data:9} seed {seed}, {len(lengths)} sequences: ours {middle:.2f} ms (best {best:.2f}), "
        f"Megatron {theirs:.0f} ms, {theirs / middle:.0f} times ({theirs / best:.0f})",
        flush=True,
    )
    return theirs / middle, theirs / best


def _milliseconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return 1e3 * (time.process_time() - start)


if __name__ == "__main__":
    main()
