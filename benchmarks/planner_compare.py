"""Two checkouts' adaptive planners side by side: the same batches, each planned by both, in one run.

    python benchmarks/planner_compare.py OLD NEW [--kinds large,links,...] [--seeds 50000:50003] [--ranks 64,1024]

OLD and NEW are folders of two checkouts (their ``src`` is imported, each in a process of its own). Give seeds that
neither planner was tuned on. Prints per kind of batch: the makespan over the lower bound, the traffic over that of the
fewest ranks (where these share any), the milliseconds to plan (CPU time, best of three), and NEW's makespan over OLD's.

Kinds: ``large`` is 32M tokens of a length distribution with free communication, ``links`` the same with the links of
a shipped profile, ``random`` 1 to 300 ranks with modelled links, ``wide`` 500 to 3000 of them, ``small`` 2 to 8,
``mixed`` ranks of two speeds and capacities. ``piped`` are the batches of ``random`` in 2 to 8 stages, ``long-pipes``
those of ``links`` in 4.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan.verify import verify
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.evaluate import evaluate
from planner_batches import cost_model, random_batch, random_small_batch, random_wide_batch, sample

Case = tuple[str, IntArray, Cluster, CostModel, int]
"""Name, lengths, cluster, cost and number of stages."""
NUM_TOKENS, CAPACITY = 2**25, 8192
KINDS = ("large", "links", "random", "wide", "small", "mixed", "piped", "long-pipes")
DATA = ("github", "byted", "github@9")
MANY_PER_SEED = 40
"""Batches of the random kinds for each seed on the command line: they are small."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seeds", default="50000:50003", help="from:to")
    parser.add_argument("--ranks", default="64,100,288,448,1000,1024,4096,16384")
    parser.add_argument("--each", action="store_true", help="print every batch whose makespan or traffic changes")
    arguments = parser.parse_args()
    ranks = [int(part) for part in arguments.ranks.split(",")]
    first, stop = map(int, arguments.seeds.split(":"))
    for kind in arguments.kinds.split(","):
        if arguments.new is None:  # the child process
            for seed in range(first, stop):
                for case in cases(kind, seed, ranks):
                    print(json.dumps(run(*case)), flush=True)
        else:
            old, new = (plan_with(tree, kind, arguments) for tree in (arguments.old, arguments.new))
            compare(kind, old, new, arguments.each)


def plan_with(tree: Path, kind: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all batches of one kind, planned by the checkout ``tree``."""
    given = [sys.executable, __file__, str(tree), "--kinds", kind, "--seeds", arguments.seeds]
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src")}
    found = subprocess.run(
        [*given, "--ranks", arguments.ranks], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return [json.loads(line) for line in found.stdout.splitlines()]


def compare(kind: str, old: list[dict[str, Any]], new: list[dict[str, Any]], each: bool) -> None:
    """Print a line for each checkout, one for their ratio, and with ``each`` one for every batch that changes."""
    print(f"{kind}: {len(old)} batches")
    for name, rows in (("old", old), ("new", new)):
        over, traffic, milliseconds = (np.array([row[key] for row in rows]) for key in ("over", "traffic", "ms"))
        print(
            f"  {name}  end / bound mean {over.mean():.4f} 95 % {np.quantile(over, 0.95):.4f} worst {over.max():.4f}   "
            f"traffic mean {np.nanmean(traffic):.3f} worst {np.nanmax(traffic):.3f}   "
            f"ms median {np.median(milliseconds):.1f} mean {milliseconds.mean():.1f} worst {milliseconds.max():.1f}"
        )
    ratio = np.array([b["end"] / a["end"] for a, b in zip(old, new, strict=True)])
    same = sum(a["fingerprint"] == b["fingerprint"] for a, b in zip(old, new, strict=True))
    print(
        f"  new / old  end mean {ratio.mean():.4f} worst {ratio.max():.4f} best {ratio.min():.4f}, later by 0.1 %: "
        f"{(ratio > 1.001).sum()}, earlier: {(ratio < 0.999).sum()}, same plan: {same}",
        flush=True,
    )
    for a, b in zip(old, new, strict=True):
        if each and (abs(b["end"] / a["end"] - 1) > 1e-3 or abs(b["traffic"] - a["traffic"]) > 0.01):
            print(
                f"    {a['name']:32} end {a['over']:.4f} -> {b['over']:.4f}   traffic {a['traffic']:.3f} -> "
                f"{b['traffic']:.3f}   ms {a['ms']:.1f} -> {b['ms']:.1f}"
            )


def cases(kind: str, seed: int, ranks: list[int]) -> Iterator[Case]:
    """The batches of one kind and seed."""
    if kind in ("large", "links", "long-pipes"):
        cost = cost_model("ideal" if kind == "large" else "case-study")
        for data in DATA[: 3 if kind == "large" else 2]:
            for count in ranks:
                if kind == "long-pipes" and count > 1024:
                    continue
                lengths = sample(data, NUM_TOKENS, seed, min(count * CAPACITY, 2**21))
                stages = 4 if kind == "long-pipes" else 1
                yield f"{data} {count} {seed}", lengths, Cluster.uniform(count, CAPACITY), cost, stages
    elif kind == "mixed":
        for data in DATA[:2]:
            for count in (64, 512):
                for interleaved in (False, True):
                    fast = np.arange(count) // 8 % 2 == 0 if interleaved else np.arange(count) < count // 2
                    cluster = Cluster(capacity_tokens=np.where(fast, 16384, 8192), speeds=np.where(fast, 2.2, 1.0))
                    lengths = sample(data, NUM_TOKENS, seed, min(count * CAPACITY, 2**21))
                    yield f"{data} {count} {interleaved} {seed}", lengths, cluster, cost_model("ideal"), 1
    else:
        draw = {"small": random_small_batch, "wide": random_wide_batch}.get(kind, random_batch)
        for number in range(MANY_PER_SEED * seed, MANY_PER_SEED * (seed + 1)):
            stages = int(np.random.default_rng(number).integers(2, 9)) if kind == "piped" else 1
            yield f"{number}", *draw(number), stages


def run(name: str, lengths: IntArray, cluster: Cluster, cost: CostModel, num_stages: int) -> dict[str, Any]:
    """Plan one batch three times. Returns the best time, the makespan and the traffic."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        plan = adaptive_plan(lengths, cluster=cluster, cost=cost, num_stages=num_stages)
        seconds.append(time.process_time() - start)
    verify(plan, num_stages=num_stages)
    found = evaluate(plan, cluster=cluster, cost=cost, num_stages=num_stages)
    return {
        "name": name,
        "end": found.end_seconds,
        "over": found.end_seconds / bound(lengths, cluster, cost),
        "traffic": found.traffic_tokens / (found.minimal_traffic_tokens or np.nan),
        "ms": 1e3 * min(seconds),
        "fingerprint": plan.digest(),
    }


def bound(lengths: IntArray, cluster: Cluster, cost: CostModel) -> float:
    """No plan ends before all compute, spread evenly, nor before the longest sequence on its best degree."""
    even = float(cost.work_seconds(lengths).sum() / cluster.speeds.sum())
    if not cluster.is_uniform:
        return even
    degrees = np.arange(cluster.fewest_ranks(lengths.max(keepdims=True))[0], cluster.num_ranks + 1)
    longest = np.full(len(degrees), float(lengths.max()))
    return max(even, float(cost.group_seconds(longest, longest**2, degrees, degrees > cost.ranks_per_node).min()))


if __name__ == "__main__":
    main()
