"""Parameters sharded by PyTorch's FSDP2 (``fully_shard``), documents by bytescale.

FSDP gathers parameters in every pass, on all ranks together. So every rank needs equally many passes, and a slice group
has to be in the same pass on all its members: ``equal_counts=True`` plans few passes, in which all ranks end together.
FSDP averages gradients over ranks, while the loss is a sum over tokens, whoever computes them: it is multiplied by the
number of ranks.

    torchrun --nproc-per-node 2 examples/fsdp.py [FOLDER]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import bytescale
from own_loop import batches, load_model


def main(folder: str = "", steps: int = 5, capacity_tokens: int = 128) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with PyTorch's own AdamW. Returns the losses, and the whole weights. Every rank calls it."""
    model = load_model(folder).train()
    hdp = bytescale.HDP(model, capacity_tokens=capacity_tokens, equal_counts=True)  # before the sharding
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches(steps):
        num_targets = sum(len(d["tokens"]) - 1 for d in batch)
        loss_sum = torch.zeros(())
        for micro in hdp.plan(batch):
            logits = model(**micro.inputs).logits[0, : micro.num_rows]
            loss = F.cross_entropy(logits, micro.labels, reduction="sum", ignore_index=-100) / num_targets
            (loss * dist.get_world_size()).backward()
            loss_sum += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss_sum)
        losses.append(float(loss_sum))
    return losses, {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


if __name__ == "__main__":
    dist.init_process_group()
    print(main(*sys.argv[1:2])[0])
    dist.destroy_process_group()
