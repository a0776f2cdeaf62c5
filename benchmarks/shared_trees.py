"""What trees of shared prefixes save on ranks behind slow links: an update on agents' trajectories.

    python -m benchmarks.shared_trees [--ranks 8] [--ranks-per-node 1] [--mbit 150] [--rounds 3]       (Linux, root)

A task is a prompt of 256 tokens, after which an agent takes ``--depth`` turns and tries ``--fan-out`` ways at each: its
trajectories are the paths from the prompt to the leaves. A turn has 16 to 256 tokens, lognormal around 64. A batch has
``--tasks`` of them. Model, nodes and links are those of ``benchmarks/grpo.py``, and a rank's micro-batch holds 1024
tokens, fewer than a task's tree. The sides take turns on the same trajectories; losses are compared:

    shared     ``hdp.plan(batch, share_prefixes=True)``
    apart      every trajectory from its first token on
    static     trees on a static mesh of data and context parallelism (``planner="static"``), whichever is best: trees
               whole on as many ranks as hold the largest, or cut to what a rank holds

Beside what each side takes stands the ratio of work, all tokens' over that of the unique ones, by counted operations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.grpo import CAPACITY, VOCABULARY, make_model, measure

import bytescale
from bytescale.cost.assumed import Rates
from bytescale.cost.model import CostModel
from bytescale.hf.batch.documents import Documents
from bytescale.planner.prefixes import Prefixes, cost_of_trees

PROMPT, SHORTEST, LONGEST, MEDIAN = 256, 16, 256, 64
SIDES = ("shared", "apart", "static")
Batch = list[dict[str, Any]]


def trajectories(arguments: argparse.Namespace, seed: int) -> Batch:
    """The same on every rank."""
    random, found = np.random.default_rng(seed), []
    for _ in range(arguments.tasks):
        paths = [random.integers(2, VOCABULARY, PROMPT)]
        for _ in range(arguments.depth):
            turns = [int(np.clip(random.lognormal(np.log(MEDIAN), 0.7), SHORTEST, LONGEST)) for _ in paths]
            paths = [
                np.concatenate([path, random.integers(2, VOCABULARY, turn)])
                for path, turn in zip(paths, turns, strict=True)
                for _ in range(arguments.fan_out)
            ]
        found += paths
    return [{"tokens": torch.as_tensor(path)} for path in found]


def cost_of(arguments: argparse.Namespace) -> CostModel:
    rate, flops = arguments.mbit * 1e6 / 8, arguments.gflops * 1e9 * arguments.cpus / arguments.ranks
    rates = Rates(
        flops_per_second=flops, attention_flops_per_second=flops, inter_node_bytes_per_second=rate,
        intra_node_bytes_per_second=2e8, latency_seconds=2e-3, launch_seconds=0.0,
    )  # fmt: skip
    spec = bytescale.HDP(make_model(), capacity_tokens=CAPACITY).engine.decoder.spec
    return rates.profile(spec, bytes_per_element=4).cost_model(ranks_per_node=arguments.ranks_per_node)


def work_saved(batch: Batch, cost: CostModel) -> tuple[float, int, int]:
    """All tokens' work over that of the unique ones, and how many there are of each."""
    fields = Documents.of(batch).fields
    rows = [
        torch.stack([a, b], dim=1).numpy()
        for a, b in zip(fields["tokens"].values(), fields["labels"].values(), strict=True)
    ]
    prefixes = Prefixes.of([own.tobytes() for own in rows], 16)
    trees = prefixes.forest(prefixes.common, 2**40)
    unique = cost_of_trees(cost, trees).work_seconds(trees.sequence_lengths).sum()
    return (
        float(cost.work_seconds(prefixes.lengths).sum() / unique),
        int(prefixes.lengths.sum()),
        int(trees.sequence_lengths.sum()),
    )


def worker(arguments: argparse.Namespace) -> None:
    """One rank. The first one writes seconds, rows and losses of each side to a file."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    cost, sides = cost_of(arguments), {}
    for name in SIDES:
        planner = "static" if name == "static" else "adaptive"
        sides[name] = bytescale.HDP(make_model(), capacity_tokens=CAPACITY, cost=cost, planner=planner)
        sides[name].adamw(1e-3)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SIDES}
    for number in range(arguments.rounds + 1):
        batch = trajectories(arguments, number)
        total = sum(len(own["tokens"]) - 1 for own in batch)
        for name, hdp in sides.items():
            dist.barrier()
            started, seen, rows = time.perf_counter(), 0.0, 0
            for micro in hdp.plan(batch, share_prefixes=name != "apart", last=True):
                loss = micro.loss_sum(hdp.model) / total
                loss.backward()
                seen, rows = seen + float(loss.detach()), rows + micro.num_rows
            hdp.step()
            numbers = torch.tensor([time.perf_counter() - started, seen, rows], dtype=torch.float64)
            dist.all_reduce(numbers[:1], op=dist.ReduceOp.MAX)
            dist.all_reduce(numbers[1:])
            found[name].append((float(numbers[0]), float(numbers[1]), float(numbers[2])))
            if dist.get_rank() == 0:
                print(f"{number} {name}: {found[name][-1]}", flush=True)
                Path(arguments.out).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def report(found: dict[str, list[list[float]]], arguments: argparse.Namespace) -> None:
    """Medians of rounds; the first update warms up."""
    rounds = min(map(len, found.values()))
    batches = [trajectories(arguments, number) for number in range(1, rounds)]
    saved, tokens, unique = (statistics.median(one) for one in zip(
        *(work_saved(batch, cost_of(arguments)) for batch in batches), strict=True))  # fmt: skip
    print(f"{tokens} tokens, {unique} unique ones; work saved {saved:.2f}x; {rounds - 1} rounds")
    losses = [[own[1] for own in side[:rounds]] for side in found.values()]
    print(f"losses differ by {max(max(each) / min(each) - 1 for each in zip(*losses, strict=True)):.1e} at most")
    apart = [own[0] for own in found["apart"]]
    for name, side in found.items():
        faster = statistics.median(apart[n] / side[n][0] for n in range(1, rounds))
        seconds, rows = (statistics.median(side[n][at] for n in range(1, rounds)) for at in (0, 2))
        print(
            f"{name:8} {seconds:7.2f} s {rows:7.0f} rows {faster:6.2f}x as fast as apart, {faster / saved:5.2f} of it"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("ranks", 8), ("ranks-per-node", 1), ("rounds", 3), ("depth", 3), ("fan-out", 3), ("tasks", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mbit", type=float, default=150.0)
    parser.add_argument("--cpus", type=float, default=1.6)
    parser.add_argument("--gflops", type=float, default=45.0, help="of a core, for plans; what ``apart`` reached here")
    parser.add_argument("--out", help="used by the ranks")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments)
    else:
        report(measure(arguments, "benchmarks.shared_trees"), arguments)


if __name__ == "__main__":
    main()
