"""CPU seconds of ``hdp.plan`` on one of many ranks, whose other ranks are not there: four fields, lognormal lengths.

Beside it what ``hdp.planned`` takes of the training thread, for the same batches.

``python benchmarks/hdp_plan.py [--documents 100000 --ranks 16384]``
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np
import torch

import bytescale
from bytescale.parity import small_model
from bytescale.runtime.group import RankGroup

CAPACITY = 8192


class OneOfMany(RankGroup):
    """A rank whose exchanges return at once, as if all others had told what this one has."""

    def __init__(self, size: int) -> None:
        super().__init__(device=torch.device("cpu"))
        self.size, self.rank = size, size // 2

    def agree(self, what: str, value: int) -> None:
        pass

    def sum_of(self, values: list[float]) -> list[float]:
        """The difference between two ranks' digests is zero where ranks have the same documents."""
        return [values[0], 0.0, 0.0, *values[3:]]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(5.6, 1.1, given.documents).astype(int) + 1, 20_000)
    batch = [
        {
            "tokens": torch.randint(2, 60, (length,)),
            "labels": torch.randint(2, 60, (length,)),
            "weights": torch.ones(length),
            "advantages": torch.zeros(length),
        }
        for length in lengths.tolist()
    ]
    hdp = bytescale.HDP(small_model("qwen3", dtype=torch.float32), capacity_tokens=CAPACITY)
    hdp.group = OneOfMany(given.ranks)
    hdp.mesh = replace(hdp.mesh, world=hdp.group, hdp=hdp.group)
    hdp.planner = bytescale.make_planner(num_ranks=given.ranks, capacity_tokens=CAPACITY, cost=hdp.cost)
    seconds: dict[str, list[float]] = {"hdp.plan": [], "of it the planner": [], "hdp.planned, training thread": []}
    for _ in range(given.repeat):
        for name, work in (("hdp.plan", lambda: hdp.plan(batch)), ("of it the planner", lambda: hdp.planner(lengths))):
            began = time.process_time()
            work()
            seconds[name].append(time.process_time() - began)
    ahead = hdp.planned(batch for _ in range(given.repeat))
    for _ in range(given.repeat):
        began = time.thread_time()
        next(ahead)
        seconds["hdp.planned, training thread"].append(time.thread_time() - began)
    print(f"{given.documents} documents, {lengths.sum()} tokens, one of {given.ranks} ranks; medians of {given.repeat}")
    for name, found in seconds.items():
        print(f"{name:28} {statistics.median(found):.4f} CPU s")


if __name__ == "__main__":
    main()
