"""Measures what shared prefixes save: steps over groups of samples of one prompt, prompts computed once or per sample.

    python benchmarks/prefixes.py [--length 1024] [--samples 8] [--groups 2] [--steps 5] [--model qwen3_5]

One rank, transformers' Llama, or a Qwen3.5 with three gated delta nets and one attention, in fp32, the loss by
`micro.loss_sum`, planning and the update included. Samples have
`length` tokens, of which the prompt is a quarter to nine tenths. Both kinds of steps take turns; times are medians of
the process's CPU time. Beside the speed-up stands the ratio of work: that of all tokens to that of the rows that are
computed, by the cost model's counted operations.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig

import bytescale
from bytescale.planner.prefixes import cost_of_trees

SHARES = (0.25, 0.5, 0.75, 0.9)
VOCABULARY = 4096


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=65536,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).train()


def qwen3_5() -> nn.Module:
    """A hybrid of the same size, as ``benchmarks/recurrent_cluster.py`` has it."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=64, max_position_embeddings=65536,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).train()


def samples(groups: int, each: int, length: int, share: float) -> list[dict[str, Any]]:
    """Documents of ``length`` tokens, ``each`` of them with one prompt, whose tokens weigh nothing."""
    random, prompt = np.random.default_rng(0), round(length * share)
    found = []
    for _ in range(groups):
        first = random.integers(2, VOCABULARY, prompt)
        for _ in range(each):
            tokens = np.concatenate([first, random.integers(2, VOCABULARY, length - prompt)])
            weights = (np.arange(length) >= prompt - 1) & (np.arange(length) < length - 1)
            found.append({"tokens": torch.as_tensor(tokens), "weights": torch.as_tensor(weights, dtype=torch.float32)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--model", choices=["llama", "qwen3_5"], default="llama")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = llama() if given.model == "llama" else qwen3_5()
    hdp = bytescale.HDP(model, capacity_tokens=given.samples * given.length)
    hdp.adamw(1e-5)

    def step(batch: list[dict[str, Any]], share_prefixes: bool) -> float:
        start = time.process_time()
        total = sum(float(document["weights"].sum()) for document in batch)
        for micro in hdp.plan(batch, share_prefixes=share_prefixes):
            (micro.loss_sum(model) / total).backward()
        hdp.step()
        return time.process_time() - start

    print("prompt   apart   shared   faster   work saved   of it")
    for share in given.shares:
        batch = samples(given.groups, given.samples, given.length, share)
        forest = hdp.plan(batch, share_prefixes=True).forest
        assert forest is not None
        works = (
            hdp.cost.work_seconds(forest.lengths).sum(),
            cost_of_trees(hdp.cost, forest).work_seconds(forest.sequence_lengths).sum(),
        )
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(given.steps + 1):
            for kind in (False, True):
                seconds = step(batch, kind)
                if number:
                    times[kind].append(seconds)
        apart, shared = (statistics.median(times[kind]) for kind in (False, True))
        faster, saved = apart / shared, works[0] / works[1]
        print(
            f"{share:5.0%} {apart:7.2f} s {shared:6.2f} s {faster:7.2f}x {saved:11.2f}x {faster / saved:7.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
