"""Log-probabilities of documents of mixed lengths, in the order in which they were given.

torchrun --nproc-per-node 2 examples/scoring.py [FOLDER]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import bytescale
from own_loop import batches, load_model


def main(folder: str = "", capacity_tokens: int = 128) -> list[torch.Tensor]:
    """Per document ``[length]`` log-probabilities of its next tokens, the same on every rank."""
    model = load_model(folder).eval()
    hdp = bytescale.HDP(model, capacity_tokens=capacity_tokens)
    (batch,) = batches(1)
    with torch.no_grad():
        for micro in hdp.plan(batch):
            hdp.collect(micro, micro.logprobs(model))
    return hdp.collected()


if __name__ == "__main__":
    dist.init_process_group()
    for number, scores in enumerate(main(*sys.argv[1:2])):
        if dist.get_rank() == 0:
            print(f"document {number}: {len(scores)} tokens, mean log-probability {scores[:-1].mean():.3f}")
    dist.destroy_process_group()
