"""Measures loops of one's own in which ranks share the parameters of layers (``HDP(shard="parameters")``).

    torchrun --nproc-per-node 4 benchmarks/sharing.py [--steps 8] [--tokens 16384]

The same transformers' Llama and the same documents of lognormal lengths, in turns, step by step:

    optimizer   every rank has all parameters and gradients; optimizer states are sharded (the default)
    domain D    D consecutive ranks share the parameters and gradients of the layers
    FSDP2       PyTorch's fully_shard over all ranks, on a static mesh that holds the longest document

Seconds are medians of the slowest rank. Bytes are those of parameters and gradients that a rank holds between steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import bytescale
from bytescale.runtime.group import RankGroup
from own_loop import documents, llama, seconds_of

Step = Callable[[list[dict[str, Any]]], float]


def hdp_loop(capacity: int, domain: int) -> tuple[Step, int]:
    """A step under HDP, and the bytes that the rank holds."""
    model = llama()
    options: dict[str, Any] = {"shard": "parameters", "domain": domain} if domain > 1 else {}
    hdp = bytescale.HDP(model, capacity_tokens=capacity, **options)
    hdp.adamw(1e-4)
    held = sum(part.values.nbytes + part.gradients.nbytes for part in (z.parameters for z in hdp.sharded().zeros))

    def step(batch: list[dict[str, Any]]) -> float:
        loss = run(hdp, model, batch, 1)
        hdp.step()
        return loss

    return step, held


def fsdp_loop(capacity: int) -> tuple[Step, int]:
    """A step under FSDP2 on static groups. FSDP averages gradients over ranks."""
    model = llama()
    hdp = bytescale.HDP(model, capacity_tokens=capacity, equal_counts=True, planner="static")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)

    def step(batch: list[dict[str, Any]]) -> float:
        loss = run(hdp, model, batch, dist.get_world_size())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    held = sum(2 * p.to_local().nbytes for p in model.parameters())
    return step, held


def run(hdp: bytescale.HDP, model: torch.nn.Module, batch: list[dict[str, Any]], scale: int) -> float:
    """Forward and backward of all micro-batches. Returns this rank's part of the mean loss."""
    total, seen = sum(len(document["tokens"]) - 1 for document in batch), 0.0
    for micro in hdp.plan(batch):
        loss = micro.loss_sum(model) / total
        (loss * scale).backward()
        seen += float(loss.detach())
    return seen


def timed(step: Step, batch: list[dict[str, Any]], group: RankGroup) -> tuple[float, float]:
    """Seconds of the slowest rank, and the mean loss."""
    found: list[float] = []
    taken = seconds_of(lambda: found.append(step(batch)), group)
    return taken, group.sum_of(found)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--capacity", type=int, default=2048)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, size = bytescale.HDP(llama(), capacity_tokens=1).group, dist.get_world_size()
    loops = {"optimizer": hdp_loop(arguments.capacity, 1)}
    loops |= {f"domain {d}": hdp_loop(arguments.capacity, d) for d in range(2, size + 1) if size % d == 0}
    loops["FSDP2"] = fsdp_loop(arguments.capacity)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    losses: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(arguments.steps + 1):
        batch = documents(arguments.tokens, arguments.capacity * size, number)
        for name, (step, _) in loops.items():
            taken, loss = timed(step, batch, group)
            losses[name].append(loss)
            if number:  # the first one warms up
                seconds[name].append(taken)
    if group.rank == 0:
        base = statistics.median(seconds["optimizer"])
        for name, every in seconds.items():
            apart = max(abs(a - b) for a, b in zip(losses[name], losses["optimizer"], strict=True))
            print(
                f"{name:10} {statistics.median(every):7.3f} s  {statistics.median(every) / base:5.2f} times  "
                f"{loops[name][1] / 2**20:7.1f} MiB held  losses apart by {apart:.1e}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
