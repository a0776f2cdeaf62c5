"""How far log-probabilities of a mixture of experts move between two dtypes, with its routes played back and without.

torchrun --nproc-per-node 2 examples/replayed_routes.py [FOLDER]

In place of an engine for rollouts, the model itself scores documents in BF16 and notes its routes. Then it scores them
in FP32, once by itself and once with these routes.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import bytescale


def load_model(folder: str) -> Any:
    """A model with random weights if no folder is named; every rank makes the same one."""
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=4,
        initializer_range=0.1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def scores(model: Any, batch: list[dict[str, Any]], capacity_tokens: int, field: str = "") -> list[torch.Tensor]:
    """Log-probabilities of each document's next tokens; ``field``: of the routes that are played back."""
    hdp = bytescale.HDP(model, capacity_tokens=capacity_tokens, forward_only=True)
    for micro in hdp.plan(batch):
        if field:
            micro.replay(field)
        hdp.collect(micro, micro.logprobs(model))
    found = hdp.collected()
    hdp.detach()
    return found


def routes(model: Any, batch: list[dict[str, Any]], capacity_tokens: int) -> list[torch.Tensor]:
    """``[length, layers, experts of a token]`` of each document, as ``hdp.routers`` names the layers."""
    hdp = bytescale.HDP(model, capacity_tokens=capacity_tokens, forward_only=True)
    for micro in hdp.plan(batch):
        micro.record_routes()
        micro.logprobs(model)
        hdp.collect(micro, micro.routes())
    found = hdp.collected()
    hdp.detach()
    return found


@torch.no_grad()
def main(folder: str = "", capacity_tokens: int = 256) -> dict[str, float]:
    """Mean absolute differences from BF16's log-probabilities, and the share of tokens with another route somewhere."""
    model = load_model(folder).eval()
    rollout = copy.deepcopy(model).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    batch = [{"tokens": torch.randint(0, model.config.vocab_size, (n,), generator=generator)} for n in (300, 90, 40, 9)]
    theirs = torch.cat(scores(rollout, batch, capacity_tokens)).float()
    noted = routes(rollout, batch, capacity_tokens)
    with_routes = [{**document, "routed": own} for document, own in zip(batch, noted, strict=True)]
    alone = torch.cat(scores(model, batch, capacity_tokens))
    replayed = torch.cat(scores(model, with_routes, capacity_tokens, "routed"))
    own = torch.cat(routes(model, batch, capacity_tokens)).sort(-1).values
    others = (own != torch.cat(noted).sort(-1).values).any(-1).any(-1)
    return {
        "tokens with another route": float(others.float().mean()),
        "difference without replay": float((alone - theirs).abs().mean()),
        "difference with replay": float((replayed - theirs).abs().mean()),
    }


if __name__ == "__main__":
    dist.init_process_group()
    for what, number in main(*sys.argv[1:2]).items():
        if dist.get_rank() == 0:
            print(f"{what}: {number:.4f}")
    dist.destroy_process_group()
