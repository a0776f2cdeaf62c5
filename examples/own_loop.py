"""A training loop of one's own over documents of mixed lengths.

torchrun --nproc-per-node 2 examples/own_loop.py            # a small random model
torchrun --nproc-per-node 8 examples/own_loop.py FOLDER     # a model of Hugging Face
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import bytescale


def load_model(folder: str = "") -> PreTrainedModel:
    """The model of a folder; without one a small Llama, the same on every rank."""
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, attention_dropout=0.0)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def batches(number: int, vocab_size: int = 256) -> Iterator[list[dict[str, Any]]]:
    """Documents of mixed lengths that count upwards; a weight says how much each of a document's tokens matters."""
    generator = torch.Generator().manual_seed(0)  # the same documents on every rank
    for _ in range(number):
        batch = []
        for length in (150, 20, 7, 60, 3):
            start = int(torch.randint(vocab_size, (1,), generator=generator))
            tokens = (start + torch.arange(length)) % (vocab_size - 2) + 2
            weights = torch.ones(length)
            weights[-1] = 0.0  # nothing follows the last token
            batch.append({"tokens": tokens, "weights": weights})
        yield batch


def main(folder: str = "", steps: int = 10, lr: float = 1e-3, capacity_tokens: int = 128) -> list[float]:
    """Train, and return the loss of every step. Every rank calls it, after ``init_process_group``."""
    model = load_model(folder).train()
    hdp = bytescale.HDP(model, capacity_tokens=capacity_tokens)
    hdp.adamw(lr=lr)
    losses = []
    for batch in batches(steps):
        total = sum(float(d["weights"].sum()) for d in batch)
        loss_sum = torch.zeros(())
        for micro in hdp.plan(batch):
            logits = model(**micro.inputs).logits[0, : micro.num_rows]
            token_losses = F.cross_entropy(logits, micro.labels, reduction="none", ignore_index=-100)
            loss = (micro.weights * token_losses).sum() / total
            loss.backward()
            loss_sum += loss.detach()
        update = hdp.step()
        if dist.is_initialized():
            dist.all_reduce(loss_sum)
        losses.append(float(loss_sum))
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"update {update.num_updates:3}  loss {losses[-1]:.4f}  gradient norm {update.grad_norm:.3f}")
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    main(*sys.argv[1:2])
    dist.destroy_process_group()
