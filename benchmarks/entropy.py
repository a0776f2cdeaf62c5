"""Log-probabilities and entropies of a large vocabulary, in chunks of rows against all logits at once.

    python benchmarks/entropy.py [--words 131072] [--tokens 512] [--rounds 3]

One rank, a Llama of one layer and hidden size 256 in fp32, a loss of PPO's kind: a clipped ratio and an entropy bonus.
Both sides take turns on the same documents, forward and backward through the whole model:

    logprobs     ``micro.logprobs(model, entropy=True)``, as TRL's and verl's losses get them under ``HDP``
    all logits   ``model(**micro.inputs)``, ``log_softmax``, and the entropy from it, as frameworks have it

Seconds are medians, and bytes the peak of living tensors beside weights and gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import bytescale
from bytescale.hf.model.counting import LiveBytes


def values_of(side: str, micro: Any, model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """``[T]`` log-probabilities of the labels, and entropies of the rows that have one."""
    known = (micro.labels >= 0).float()
    if side == "logprobs":
        scores = micro.logprobs(model, entropy=True)
        return scores.logprobs, scores.entropy * known
    logits = model(**micro.inputs).logits[0, : micro.num_rows]
    every = logits.log_softmax(dim=-1)
    labelled = micro.labels.clamp(min=0)[:, None]
    return every.gather(1, labelled)[:, 0] * known, -(every.exp() * every).sum(dim=-1) * known


def step(side: str, hdp: bytescale.HDP, model: torch.nn.Module, batch: list[dict[str, Any]]) -> tuple[float, float]:
    """Forward and backward of a batch. Returns the loss, and the largest gradient of the head."""
    total = sum(float(document["weights"].sum()) for document in batch)
    seen = 0.0
    for micro in hdp.plan(batch):
        logprobs, entropy = values_of(side, micro, model)
        ratio = (logprobs - logprobs.detach() + 0.1).exp()
        gain = torch.minimum(ratio, ratio.clamp(0.8, 1.2)) + 0.01 * entropy
        loss = -(micro.weights * gain).sum() / total
        loss.backward()
        seen += float(loss.detach())
    largest = float(model.get_output_embeddings().weight.grad.abs().max())  # type: ignore[operator]
    hdp.zero_grad()
    return seen, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=arguments.words, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config)
    hdp = bytescale.HDP(model, capacity_tokens=arguments.tokens)
    hdp.optimizer(torch.optim.SGD, lr=0.0)
    batch = [
        {"tokens": torch.randint(0, arguments.words, (length,)), "weights": torch.ones(length)}
        for length in (arguments.tokens // 2, arguments.tokens // 4, arguments.tokens // 4)
    ]
    sides = ("logprobs", "all logits")
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    peaks, results = {}, {}
    for round_number in range(arguments.rounds):
        for side in sides:
            started = time.perf_counter()
            results[side] = step(side, hdp, model, batch)
            seconds[side].append(time.perf_counter() - started)
        if not round_number:
            for side in sides:
                with LiveBytes() as live:
                    step(side, hdp, model, batch)
                peaks[side] = live.peak
    print(f"{arguments.words} words, {arguments.tokens} tokens, fp32, one thread")
    for side in sides:
        loss, largest = results[side]
        print(
            f"{side:12} {statistics.median(seconds[side]):7.2f} s   peak {peaks[side] / 2**30:5.2f} GiB   "
            f"loss {loss:.7f}   largest gradient of the head {largest:.6e}"
        )


if __name__ == "__main__":
    main()
