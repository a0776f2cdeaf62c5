"""Plans 100,000 trajectories that share prefixes on 1024 ranks: CPU seconds of the trie, and of what comes behind it.

    python benchmarks/planned_trees.py [--ranks 1024] [--trajectories 100000]

Two kinds of trajectories, whose lengths are lognormal: ``samples``, eight of each prompt (medians of 245 tokens for
both), and ``agents``, a prompt of 150 tokens and three turns of 90, with four ways at each: 64 trajectories a task.
Links are free. The bound is the work of the unique tokens, spread evenly over the ranks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bytescale.hf.batch.planning import make_planner
from bytescale.planner.evaluate import evaluate
from bytescale.planner.prefixes import Prefixes, cost_of_trees, plan_prefixes

VOCABULARY = 50_000


def words(random: np.random.Generator, median: float, sigma: float, least: int, most: int) -> np.ndarray:
    count = int(np.clip(random.lognormal(np.log(median), sigma), least, most))
    return random.integers(0, VOCABULARY, count, dtype=np.int32)


def samples(random: np.random.Generator) -> list[np.ndarray]:
    prompt = words(random, 245, 0.8, 16, 4096)
    return [np.concatenate([prompt, words(random, 245, 1.0, 16, 8192)]) for _ in range(8)]


def agents(random: np.random.Generator) -> list[np.ndarray]:
    paths = [words(random, 150, 0.5, 16, 2048)]
    for _ in range(3):
        paths = [np.concatenate([path, words(random, 90, 1.0, 4, 4096)]) for path in paths for _ in range(4)]
    return paths


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """The least of three."""
    taken, result = [], None
    for _ in range(3):
        started = time.process_time()
        result = work()
        taken.append(time.process_time() - started)
    return min(taken), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--trajectories", type=int, default=100_000)
    given = parser.parse_args()
    for make in (samples, agents):
        random, found = np.random.default_rng(0), list[np.ndarray]()
        while len(found) < given.trajectories:
            found += make(random)
        rows = [one.tobytes() for one in found]
        trie, prefixes = cpu_seconds(partial(Prefixes.of, rows, 4))
        planner = make_planner(num_ranks=given.ranks, capacity_tokens=max(8192, int(prefixes.lengths.max())))
        seconds, (plan, forest) = cpu_seconds(partial(plan_prefixes, planner, prefixes))
        alone, _ = cpu_seconds(partial(planner, plan.lengths))
        end = evaluate(plan, cluster=planner.cluster, cost=cost_of_trees(planner.cost, forest)).end_seconds
        whole = prefixes.forest(prefixes.common, 2**40)
        unique = cost_of_trees(planner.cost, whole).work_seconds(whole.sequence_lengths).sum()
        print(
            f"{make.__name__:8} {len(found)} trajectories of {prefixes.lengths.sum() / 1e6:.1f}M tokens, "
            f"{whole.sequence_lengths.sum() / 1e6:.1f}M unique: trie {trie:.2f} s, beyond it {seconds:.3f} s "
            f"(a plan of {plan.num_sequences} sequences: {alone:.3f} s), makespan {end / unique * given.ranks:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
