"""A driver that plans, and workers that receive their rows, as frameworks for reinforcement learning are built.

The driver holds the batch and needs no model: it plans from lengths, cuts every field, and sends each worker its part.
Here rank 0 is the driver too, and parts travel through ``scatter_object_list``; any other way will do (Ray, queues).

    torchrun --nproc-per-node 2 examples/driver.py [FOLDER]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import bytescale
from own_loop import batches, load_model


def drive(num_workers: int, capacity_tokens: int) -> list[bytescale.RankBatch]:
    """Plan one batch with advantages, and cut it."""
    (batch,) = batches(1)
    for number, document in enumerate(batch):
        document["advantage"] = 0.5 - number  # one number per document, which all its tokens get
    planner = bytescale.make_planner(num_ranks=num_workers, capacity_tokens=capacity_tokens)
    plan = planner([len(document["tokens"]) for document in batch])
    return [bytescale.cut(plan, rank, batch) for rank in range(num_workers)]


def main(folder: str = "", capacity_tokens: int = 128) -> float:
    """One policy-gradient step. Returns the norm of its gradient. Every rank calls it."""
    model = load_model(folder).train()
    hdp = bytescale.HDP(model, capacity_tokens=capacity_tokens)
    hdp.optimizer(torch.optim.SGD, lr=1e-3)
    parts: list[bytescale.RankBatch | None] = [None]
    if dist.is_initialized():
        dist.scatter_object_list(parts, drive(dist.get_world_size(), capacity_tokens) if dist.get_rank() == 0 else None)
    else:
        parts = list(drive(1, capacity_tokens))
    assert parts[0] is not None, "every worker receives a part"
    for micro in hdp.run(parts[0]):
        (-(micro.advantage * micro.logprobs(model)).sum() / 100).backward()
    return hdp.step().grad_norm


if __name__ == "__main__":
    dist.init_process_group()
    print(f"gradient norm {main(*sys.argv[1:2]):.4f}")
    dist.destroy_process_group()
