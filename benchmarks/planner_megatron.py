"""Megatron-LM's packing-aware dynamic context parallelism and ours, on the same batches, by three cost models.

    git clone --branch dev https://github.com/NVIDIA/Megatron-LM
    python benchmarks/planner_megatron.py Megatron-LM [--data github,byted] [--ranks 64,256] [--seeds 3]

Their scheduler is ``DefaultDynamicCPScheduler`` of ``megatron/core/datasets/data_schedule.py`` (branch ``dev``), which
packages on PyPI do not have yet (0.16.1). Its file runs as it is; other modules of Megatron are stand-ins. A pack
starts when all of its ranks have reached it, without a barrier, and takes what the cost model says, as ours do.

Cost models: ``theirs`` is what it balances itself, s^2 / ranks, and nothing else; ``work`` is s^2 + 24576 s, about that
of a model of 7B; ``links`` is the case study's times and messages. Prints the makespan over even compute, medians over
seeds, and the CPU seconds of one plan.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.evaluate import evaluate
from planner_batches import cost_model, sample

CAPACITY = 8192
REAL = ("megatron.core.datasets.data_schedule", "megatron.core.datasets.data_schedule_utils")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the modules ``REAL`` from a checkout, and stand-ins for all other ones of Megatron."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in REAL:
            file = self.checkout / (name.replace(".", "/") + ".py")
            return importlib.util.spec_from_file_location(name, file)
        if name.partition(".")[0] == "megatron":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__ = spec, []
        return module  # type: ignore[return-value]

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in has nothing to run."""


def load_scheduler(checkout: Path) -> Any:
    """The class. Raises ``SystemExit`` where the checkout does not have it."""
    sys.meta_path.insert(0, StandIns(checkout))
    try:
        return importlib.import_module(REAL[0]).DefaultDynamicCPScheduler
    except (ImportError, OSError, AttributeError) as error:
        raise SystemExit(f"{checkout} is not a checkout of Megatron-LM's branch dev ({error})") from error


def megatron_end(groups: Sequence[Sequence[Sequence[int]]], lengths: IntArray, cost: CostModel) -> float:
    """The makespan of micro-batches, each of which has the samples of every rank."""
    ends = np.zeros(len(groups[0]))
    for of_ranks in groups:
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, samples in enumerate(of_ranks):
            members.setdefault(tuple(samples), []).append(rank)
        for samples, ranks in members.items():
            tokens = lengths[list(samples)]
            far = len({rank // cost.ranks_per_node for rank in ranks}) > 1
            taken = cost.group_seconds(tokens.sum(), cost.squares_of(tokens).sum(), len(ranks), far)
            ends[ranks] = ends[ranks].max() + float(taken)
    return float(ends.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--data", default="github,byted")
    parser.add_argument("--ranks", default="64,256")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens-per-rank", type=int, default=32768)
    arguments = parser.parse_args()
    scheduler = load_scheduler(arguments.checkout)
    costs = {
        "theirs": CostModel.from_work(linear_per_square=0.0),
        "work": CostModel.from_work(),
        "links": cost_model("case-study"),
    }
    print("data      ranks  cost    Megatron   ours  Megatron / ours   seconds to plan: Megatron   ours")
    for data in arguments.data.split(","):
        for num_ranks in map(int, arguments.ranks.split(",")):
            rows = [compare(scheduler, data, num_ranks, seed, arguments, costs) for seed in range(arguments.seeds)]
            for name in costs:
                theirs, ours, took, our_took = (
                    statistics.median(part) for part in zip(*(row[name] for row in rows), strict=True)
                )
                print(
                    f"{data:9} {num_ranks:5}  {name:7} {theirs:8.3f} {ours:6.3f} {theirs / ours:16.2f} "
                    f"{took:27.2f} {our_took:6.3f}",
                    flush=True,
                )


def compare(
    scheduler: Any, data: str, num_ranks: int, seed: int, arguments: argparse.Namespace, costs: dict[str, CostModel]
) -> dict[str, tuple[float, float, float, float]]:
    """By cost model: the ends of both over even compute, and the CPU seconds of both plans."""
    lengths = sample(data, arguments.tokens_per_rank * num_ranks, 4000 + seed, min(num_ranks * CAPACITY, 2**21))
    began = time.process_time()
    groups = scheduler(CAPACITY, 1, num_ranks, None).get_groups_and_subsamples(list(enumerate(lengths.tolist())))
    took = time.process_time() - began
    assert {number for group in groups for own in group for number in own} == set(range(len(lengths)))
    found, cluster = {}, Cluster.uniform(num_ranks, CAPACITY)
    for name, cost in costs.items():
        even = float(cost.work_seconds(lengths).sum()) / num_ranks
        began = time.process_time()
        plan = adaptive_plan(lengths, cluster=cluster, cost=cost)
        our_took = time.process_time() - began
        ours = evaluate(plan, cluster=cluster, cost=cost).end_seconds
        found[name] = megatron_end(groups, lengths, cost) / even, ours / even, took, our_took
    return found


if __name__ == "__main__":
    main()
