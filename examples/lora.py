"""LoRA with peft: only the adapters are trained; the base model, its embedding and its head are frozen.

torchrun --nproc-per-node 2 examples/lora.py [FOLDER]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

import bytescale
from own_loop import batches, load_model


def main(folder: str = "", steps: int = 5, capacity_tokens: int = 128) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train adapters. Returns the losses, and the adapters' weights. Every rank calls it."""
    model = load_model(folder)
    # The same adapters on every rank; no dropout, which would depend on the plan (HDP refuses it).
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])).train()
    hdp = bytescale.HDP(model, capacity_tokens=capacity_tokens)
    hdp.adamw(lr=1e-2)
    losses = []
    for batch in batches(steps):
        num_targets = sum(len(d["tokens"]) - 1 for d in batch)
        loss_sum = torch.zeros(())
        for micro in hdp.plan(batch):
            # The logits of all rows never exist together: loss_sum goes through the head a few rows at a time.
            loss = micro.loss_sum(model) / num_targets
            loss.backward()
            loss_sum += loss.detach()
        hdp.step()
        if dist.is_initialized():
            dist.all_reduce(loss_sum)
        losses.append(float(loss_sum))
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return losses, trained


if __name__ == "__main__":
    dist.init_process_group()
    print(main(*sys.argv[1:2])[0])
    dist.destroy_process_group()
