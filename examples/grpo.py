"""GRPO on a toy task: transformers' generate samples, every rank its share of the prompts, and HDP updates.

The task: answer with even words. Rewards rise within some updates. After a kill, the same command continues exactly:
what is sampled depends on the weights, the update and the prompt alone.

    torchrun --nproc-per-node 4 examples/grpo.py FOLDER_OF_CHECKPOINTS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import bytescale
from bytescale.hf.batch.rollouts import rollout_documents
from bytescale.runtime.plain_data import all_gather_json

WORDS, END, PER_PROMPT = 32, 1, 6
CLIP = 0.2


def make_policy() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        eos_token_id=END, bos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def reward_of(answer: list[int]) -> float:
    """The share of even words in an answer."""
    return sum(word % 2 == 0 for word in answer) / max(1, len(answer))


@torch.no_grad()
def sample(policy: LlamaForCausalLM, prompt: list[int], seed: int) -> list[dict[str, Any]]:
    """Several trajectories of one prompt, of lengths that differ widely."""
    torch.manual_seed(seed)
    given = torch.tensor([prompt] * PER_PROMPT)
    texts = policy.generate(
        given, attention_mask=torch.ones_like(given), do_sample=True, max_new_tokens=4 if seed % 4 else 36, top_k=0
    )
    trajectories = []
    for text in texts[:, len(prompt) :].tolist():
        answer = text[: text.index(END) + 1] if END in text else text
        written = {"tokens": answer, "logprobs": [0.0] * len(answer)}  # computed below, as in training
        trajectories.append({"prompt": prompt, "turns": [written], "reward": reward_of(answer), "group": seed})
    return trajectories


def rollouts(policy: LlamaForCausalLM, step: int, num_prompts: int) -> list[dict[str, Any]]:
    """The trajectories of all prompts of an update, the same on every rank."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    seeds = [step * num_prompts + number for number in range(num_prompts)]
    own = [(seed, sample(policy, [2 + seed % 30, 3], seed)) for seed in seeds[rank::ranks]]
    group = dist.group.WORLD if dist.is_initialized() else None
    found = [pair for part in all_gather_json(own, group) for pair in part]
    return [trajectory for _, own in sorted(found, key=lambda pair: pair[0]) for trajectory in own]


def update(hdp: bytescale.HDP, policy: LlamaForCausalLM, trajectories: list[dict[str, Any]]) -> None:
    """Two updates on the same trajectories, under the clipped loss of GRPO."""
    documents = rollout_documents(trajectories)
    for document, logprobs in zip(documents, bytescale.score(hdp, documents), strict=True):
        document["old_logprobs"] = logprobs
    total = sum(float(document["weights"].sum()) for document in documents)
    for _ in range(2):
        for micro in hdp.plan(documents):
            ratio = (micro.logprobs(policy) - micro.old_logprobs).exp()
            gain = torch.minimum(ratio * micro.advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * micro.advantage)
            (-(micro.weights * gain).sum() / total).backward()
        hdp.step()


def main(
    folder: str = "", steps: int = 12, lr: float = 2e-2, capacity_tokens: int = 24, num_prompts: int = 8
) -> list[float]:
    """Train, and return the mean reward before every update. Every rank calls it, after ``init_process_group``."""
    policy = make_policy()
    hdp = bytescale.HDP(policy, capacity_tokens=capacity_tokens)
    hdp.adamw(lr=lr, weight_decay=0.0)
    rewards: list[float] = []
    if folder and any(Path(folder).glob("step-*")):
        rewards = hdp.load(folder)["rewards"]
    for step in range(len(rewards), steps):
        trajectories = rollouts(policy, step, num_prompts)
        rewards.append(sum(one["reward"] for one in trajectories) / len(trajectories))
        update(hdp, policy, trajectories)
        if folder:
            hdp.save(folder, {"rewards": rewards})
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"update {step + 1:3}  mean reward {rewards[-1]:.3f}")
    return rewards


if __name__ == "__main__":
    dist.init_process_group()
    main(*sys.argv[1:2])
    dist.destroy_process_group()
