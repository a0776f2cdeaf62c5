"""What an update changes of the weights in BF16, and what it takes to send that: ``hdp.weight_parts``, ``SentWeights``.

torchrun --nproc-per-node 2 benchmarks/weight_parts.py [--shard parameters]

A Qwen3 of random weights under AdamW, a document of random tokens a rank. Bytes and values are those of all ranks
together, over those of all weights; seconds are the first rank's, without a message.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

import bytescale

SHAPE = {
    "vocab_size": 16000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "head_dim": 64,
    "num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    options.add_argument("--updates", type=int, default=4)
    options.add_argument("--shard", choices=["optimizer", "parameters"], default="optimizer")
    given = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE), dtype=torch.bfloat16)
    total = sum(parameter.numel() for parameter in model.parameters())
    domain = dist.get_world_size() if given.shard == "parameters" else None
    hdp = bytescale.HDP(model, capacity_tokens=256, shard=given.shard, domain=domain)
    hdp.adamw(lr=given.rates[0])

    def tell(what: str, sent: bytescale.SentWeights, updates: int, rate: float = 0.0) -> None:
        seconds, shares = [], []
        for _ in range(updates):
            if rate:
                batch = [{"tokens": torch.randint(0, 16000, (200,))} for _ in range(dist.get_world_size())]
                for micro in hdp.plan(batch):
                    (micro.loss_sum(model) / 199 / len(batch)).backward()
                hdp.step(lr=rate)
            dist.barrier()
            start = time.perf_counter()
            parts = [(part.num_bytes, len(part.values)) for part in sent.changed(hdp.weight_parts(torch.bfloat16))]
            seconds.append(time.perf_counter() - start)
            sums = torch.tensor([float(sum(own)) for own in zip(*parts, strict=True)] + [float(sent.num_bytes)])
            dist.all_reduce(sums)
            shares.append([float(own) / total for own in sums])
        number, values, kept = (statistics.median(own) for own in zip(*shares, strict=True))
        if dist.get_rank() == 0:
            print(
                f"{what:>12}: values {values:6.1%}, bytes {number / 2:6.1%}, {statistics.median(seconds):.2f} s, "
                f"copies of {kept / 2:.2f} times the weights over all ranks",
                flush=True,
            )

    for rate in given.rates:
        sent = bytescale.SentWeights()
        tell("all", sent, 1)
        tell(f"rate {rate:.0e}", sent, given.updates, rate)
    start = time.perf_counter()
    num_bytes = sum(value.nbytes for _, value in hdp.weights(torch.bfloat16))
    if dist.get_rank() == 0:
        seconds = time.perf_counter() - start
        print(f"hdp.weights: {num_bytes / 2 / total:.0%} of the weights on every rank, {seconds:.2f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
