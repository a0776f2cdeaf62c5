"""The planner of rounds on mixed lengths: lockstep makespan over the lower bound, rounds, traffic and time to plan.

    python benchmarks/planner_rounds.py [--ranks 8,64,256,1024] [--seeds 50000:50003] [--random 90000:90300]
        [--tokens 8192]

Batches have ``--tokens`` for each rank (64K, and at least 1M together) of the length distributions, and a rank's
micro-batch has room for 8K tokens. The bound is all compute spread evenly. ``free`` is work s^2 + 24576 s and free
links; ``counted`` the counted costs of the 7b model on an assumed GPU with 200 GB/s inside a node of 8 and 25 GB/s
across; ``gathers`` these with the traffic of parameters that are sharded over a node. ``static`` is the mesh of the
fewest ranks, in lockstep. ``--random`` compares with it on random batches, domains and gathers. Times are CPU time of
one core, the best of three.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np

from bytescale.config.presets import PRESETS
from bytescale.cost.assumed import MeshCosts
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan.verify import verify
from bytescale.planner.adaptive.aligned import align
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import static_plan
from bytescale.planner.evaluate import evaluate
from bytescale.planner.rounds.planner import rounds_plan
from bytescale.train.parts.describe import spec_of_content
from planner_batches import random_batch, sample

CAPACITY, NODE = 8192, 8
COSTS = {
    "free": CostModel.from_work(),
    "counted": MeshCosts(kind="cuda", bytes_per_element=2).assumed(spec_of_content(PRESETS["7b"])),
    "gathers": MeshCosts(kind="cuda", bytes_per_element=2, domain=NODE).assumed(spec_of_content(PRESETS["7b"])),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,256,1024")
    parser.add_argument("--seeds", default="50000:50003", help="from:to")
    parser.add_argument("--random", default="", help="from:to")
    parser.add_argument("--tokens", type=int, default=2**16, help="of a batch and rank")
    arguments = parser.parse_args()
    for name, cost in COSTS.items():
        for data in ("github", "byted"):
            for num_ranks in map(int, arguments.ranks.split(",")):
                for seed in range(*map(int, arguments.seeds.split(":"))):
                    mixed(name, cost, data, num_ranks, seed, arguments.tokens)
    if arguments.random:
        against_the_mesh(range(*map(int, arguments.random.split(":"))))


def mixed(name: str, cost: CostModel, data: str, num_ranks: int, seed: int, tokens: int) -> None:
    """Print a line for one batch."""
    least = 2**20 if tokens == 2**16 else 0
    lengths = sample(data, max(least, tokens * num_ranks), seed, min(num_ranks * CAPACITY, 2**21))
    cluster = Cluster.uniform(num_ranks, CAPACITY)
    domain = NODE if cost.gather_seconds else num_ranks
    seconds = []
    for _ in range(3):
        start = time.process_time()
        plan = rounds_plan(lengths, cluster=cluster, cost=cost, domain=domain)
        seconds.append(time.process_time() - start)
    verify(plan)
    outcome = evaluate(plan, cluster=cluster, cost=cost)
    piped = align(adaptive_plan(lengths, cluster=cluster, cost=cost, num_stages=2), cluster=cluster, cost=cost)
    others = (replace(one, domain=domain) for one in (static_plan(lengths, cluster=cluster), piped))
    mesh, aligned = (evaluate(one, cluster=cluster, cost=cost).over_ideal for one in others)
    fewest = -(-int(lengths.sum()) // (num_ranks * CAPACITY))
    print(
        f"{name:8} {data:6} {num_ranks:5} ranks, seed {seed}: end / bound {outcome.over_ideal:.4f}, rounds "
        f"{plan.rank_rounds.max()} (fewest {fewest}), traffic / fewest "
        f"{outcome.traffic_tokens / max(outcome.minimal_traffic_tokens, 1):.2f}, {1e3 * min(seconds):.0f} ms; "
        f"static {mesh:.2f}, for pipelines {aligned:.2f} in {piped.rank_rounds.max()}",
        flush=True,
    )


def against_the_mesh(seeds: range) -> None:
    """Print how often the plan takes longer than the mesh's, in random domains and with random gathers."""
    ratios = []
    for seed in seeds:
        lengths, cluster, cost = random_batch(seed)
        random = np.random.default_rng(seed)
        domain = int(random.choice([d for d in range(1, cluster.num_ranks + 1) if cluster.num_ranks % d == 0]))
        even = float(cost.work_seconds(lengths).sum()) / cluster.num_ranks
        rounds = -(-int(lengths.sum()) // int(cluster.capacity_tokens.sum()))
        cost = replace(cost, gather_seconds=float(random.choice([0, 0.3, 1, 3])) * even / rounds)
        plan = rounds_plan(lengths, cluster=cluster, cost=cost, domain=domain)
        verify(plan)
        mesh = replace(static_plan(lengths, cluster=cluster), domain=domain)
        ends = [evaluate(one, cluster=cluster, cost=cost).end_seconds for one in (plan, mesh)]
        ratios.append(ends[0] / ends[1])
    slower = sum(ratio > 1 + 1e-9 for ratio in ratios)
    print(f"{len(ratios)} random: end / static mean {np.mean(ratios):.3f} worst {max(ratios):.4f}, slower {slower}")


if __name__ == "__main__":
    main()
