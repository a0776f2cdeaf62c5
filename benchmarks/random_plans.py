"""Runs thousands of random plans for real: none may hang, and a sample is compared with one process.

    python benchmarks/random_plans.py --plans 10000

A plan has random lengths, groups of 1 to 16 ranks in every shape, random member orders and, without a pipeline, random
member weights (``bytescale.parity.compare``). ``verify`` checks it. The executor then runs one step of a small Llama of
transformers in fp64 on every rank of a random mesh: HDP alone, with tensor parallelism, with a pipeline, or with both.
Ranks are threads with real gloo messages over loopback. They stay for a block of plans, so that a message of one plan
that is not received meets the next plan. Every ``--every``-th plan's loss and gradients are compared with those of one
process that runs every sequence whole.

The output has one line per kind of mesh. A plan that does not end within ``--limit`` seconds is named by its seed.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.ranks import run_mesh
from tests.helpers.steps import Batch, slice_batch, worst_relative_error
from tests.hf.mesh_steps import put_together, rank_model
from torch import nn

from bytescale.attention import select_kernel
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.parity import Setup, small_model
from bytescale.parity.compare import Document, WideCasts, plain_step, random_documents, random_plan
from bytescale.plan import Plan, RankPlan
from bytescale.plan.verify import verify
from bytescale.planner.adaptive.aligned import align
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.zero import sum_replicas

DTYPE, TOLERANCE = torch.float64, 1e-10
BLOCK = 100
"""Plans that the same ranks run one after the other."""
COST = CostModel.from_work(linear_per_square=40)


@dataclass(frozen=True)
class Block:
    """What all plans of a block have in common."""

    kind: str
    mesh: MeshShape
    family: dict[str, Any]
    checkpointing: str

    def model(self) -> nn.Module:
        return small_model("llama", dtype=DTYPE, vocab_size=68, **self.family)


def draw_block(random: np.random.Generator, number: int) -> Block:
    """Half of the blocks are HDP alone, on up to 16 ranks, and more often on few."""

    def of(*sizes: int) -> int:
        return int(random.choice(sizes))

    alone = MeshShape(hdp=int(random.integers(1, 17, 2).min()))
    tp = of(2, 4)
    kind, mesh = [
        ("HDP alone", alone),
        ("tensor parallel", MeshShape(hdp=of(2, 3) if tp == 2 else 2, tp=tp)),
        ("HDP alone", alone),
        ("pipeline", MeshShape(pp=of(2, 3), hdp=of(2, 3, 4))),
        ("HDP alone", alone),
        ("pipeline and tensor parallel", MeshShape(pp=2, hdp=2, tp=2)),
    ][number % 6]
    family = {
        "num_hidden_layers": mesh.pp,
        "num_key_value_heads": 4 // of(1, 2, 4),
        "tie_word_embeddings": of(0, 1) == 1,
    }
    return Block(
        kind=kind,
        mesh=mesh,
        family=family,
        checkpointing=str(random.choice(["none", "full", "attention"])),
    )


def draw_case(block: Block, seed: int, model: nn.Module) -> tuple[Plan, list[Document]]:
    """Return a verified plan and its documents."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 1 + int(random.choice([2, 12, 60])), int(random.integers(1, 7))).tolist()
    plan = random_plan(lengths, block.mesh.hdp, seed, weighted=block.mesh.pp == 1 and seed % 2 == 1)
    if block.mesh.pp > 1:
        plan = align(plan, cluster=Cluster.uniform(block.mesh.hdp, int(np.sum(lengths))), cost=COST)
    verify(plan, num_stages=block.mesh.pp)
    documents = random_documents(model, Setup(lengths=tuple(lengths), seed=seed))
    documents[0]["labels"][0] = 5  # at least one has a loss
    return plan, documents


def run_block(
    block: Block, whole: nn.Module, cases: dict[int, tuple[Plan, list[Document]]], compared: set[int], limit: float
) -> dict[int, tuple[float, dict[str, Any]]]:
    """Run all plans of a block. Return the loss and the whole gradients of the plans ``compared``, by seed."""
    at: dict[int, int] = {}

    def one_rank(mesh: Mesh) -> dict[int, tuple[float, dict[str, Any]]]:
        with WideCasts():
            model = rank_model(whole, mesh)
        flat, kernel = model.parameters, select_kernel("math", torch.device("cpu"), DTYPE)
        executor = model.executor(mesh, kernel, checkpointing=block.checkpointing)
        results = {}
        for seed, (plan, documents) in cases.items():
            batch = Batch(*([document[name] for document in documents] for name in ("tokens", "labels", "weights")))
            at[mesh.world.rank] = seed
            flat.gradients.zero_()
            rank_plan = RankPlan.of(plan, mesh.hdp.rank)
            inputs = [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches]
            with WideCasts():
                result = executor.run(rank_plan, inputs, num_global_targets=1.0)
            sum_replicas(flat, mesh.tp)
            if seed in compared:
                gradients = {entry.name: (entry.cut, flat.gradient_of(entry).clone()) for entry in flat.entries}
                results[seed] = result.loss_sum, gradients
        return results

    try:
        ranks = run_mesh(block.mesh, one_rank, timeout_seconds=limit)
    except AssertionError as error:
        raise SystemExit(f"{block}, seeds {sorted(set(at.values()))} under way: {error}") from error
    outcome = {}
    for seed in compared:
        loss = sum(results[seed][0] for results in ranks)
        outcome[seed] = loss, put_together([results[seed][1] for results in ranks])
    return outcome


def error_of(model: nn.Module, documents: list[Document], ours: tuple[float, dict[str, Any]]) -> float:
    """Return the largest relative error of the loss and of any gradient against one process."""
    total = float(sum(document["weights"].sum() for document in documents))  # by which the reference divides
    reference = plain_step(copy.deepcopy(model), documents)
    of_loss = abs(ours[0] / total - reference.loss) / max(abs(reference.loss), 1e-300)
    gradients = {name: value / total for name, value in ours[1].items()}
    return max(of_loss, worst_relative_error(gradients, reference.gradients))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=10, help="compare every so many-th plan with one process")
    parser.add_argument("--limit", type=float, default=300.0, help=f"seconds for a block of {BLOCK} plans")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plans, shared, compared_plans, worst = Counter[str](), Counter[str](), Counter[str](), dict[str, float]()
    degrees, shapes, started = Counter[int](), set[tuple[int, int]](), time.perf_counter()
    seconds = dict[str, float]()
    stop = arguments.first_seed + arguments.plans
    for first in range(arguments.first_seed, stop, BLOCK):
        seeds = range(first, min(first + BLOCK, stop))
        block = draw_block(np.random.default_rng([first, 1]), first // BLOCK)
        model = block.model()
        cases = {seed: draw_case(block, seed, model) for seed in seeds}
        compared = {seed for seed in seeds if seed % arguments.every == 0}
        began = time.perf_counter()
        for seed, ours in run_block(block, model, cases, compared, arguments.limit).items():
            error = error_of(model, cases[seed][1], ours)
            worst[block.kind] = max(worst.get(block.kind, 0.0), error)
            if not error <= TOLERANCE:
                raise SystemExit(f"seed {seed} ({block}): an error of {error:.1e} against one process")
        seconds[block.kind] = seconds.get(block.kind, 0.0) + time.perf_counter() - began
        plans[block.kind] += len(seeds)
        compared_plans[block.kind] += len(compared)
        for plan, _ in cases.values():
            wide = plan.group_sizes > 1
            shared[block.kind] += int(wide.sum())
            degrees.update(plan.group_sizes[wide].tolist())
            shapes.update(zip(plan.group_sizes[wide].tolist(), plan.group_columns[wide].tolist(), strict=True))
        if (first // BLOCK) % 5 == 4:
            print(f"{seeds[-1] + 1 - arguments.first_seed} plans, {time.perf_counter() - started:.0f} s", flush=True)
    print(f"\n{'mesh':30} {'plans':>6} {'shared groups':>14} {'compared':>9} {'largest error':>14} {'seconds':>8}")
    for kind, count in plans.items():
        checked = f"{compared_plans[kind]:>9} {worst.get(kind, 0.0):>14.1e}"
        print(f"{kind:30} {count:>6} {shared[kind]:>14} {checked} {seconds[kind]:>8.0f}")
    print(
        f"degrees {min(degrees)} to {max(degrees)}, {len(shapes)} shapes; no plan hung, "
        f"{time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
