"""What ``make check-verl`` runs on two ranks: routes, played back as verl hands them on, in fp32.

torchrun --nproc-per-node 2 routes.py OUT

Log-probabilities equal those of plain transformers whose routers are written out by hand: with the routes of rollouts
(R3), and with those that the engine has recorded when it scored the rollouts, after its routers have changed (R2).
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from check import WORDS, our_engine, rollouts, worker
from tensordict import TensorDict
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from verl.workers.config import EngineRouterReplayConfig

LAYERS, EXPERTS, CHOSEN = 3, 8, 2


def make_model(folder: Path) -> None:
    """Its first layer has no experts, so that rollouts have numbers for it which mean nothing."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        mlp_only_layers=[0], norm_topk_prob=True, pad_token_id=0,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def move_routers(folder: Path, moved: Path) -> None:
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.weight.data = layer.mlp.gate.weight.data.flip(0)
    model.save_pretrained(moved)


def batch() -> tuple[TensorDict, list[Tensor]]:
    """Rollouts with routes as verl has them: of all layers, zeros for the last token. And the latter alone."""
    data = rollouts(dist.get_rank(), 0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    routes = []
    for tokens in data["input_ids"].unbind():
        own = torch.rand(len(tokens), LAYERS, EXPERTS, generator=generator).topk(CHOSEN, -1).indices.to(torch.int16)
        own[:, 0] = own[-1] = 0
        routes.append(own)
    data["routed_experts"] = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
    return data, routes


def alone(folder: Path, data: TensorDict, routes: list[Tensor]) -> list[Tensor]:
    """Log-probabilities of each sequence's next tokens, in plain transformers."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted: dict[int, Tensor] = {}

    def forced(place: int, router: Any) -> Any:
        plain = router.forward

        def forward(hidden: Tensor) -> Any:
            logits, weights, chosen = plain(hidden)
            own = logits.softmax(-1).gather(-1, wanted[place])
            weights, chosen = weights.clone(), chosen.clone()
            weights[:-1], chosen[:-1] = (own / own.sum(-1, keepdim=True))[:-1].to(weights), wanted[place][:-1]
            return logits, weights, chosen

        return forward

    for place in range(1, LAYERS):
        router = model.model.layers[place].mlp.gate
        router.forward = forced(place, router)
    found = []
    for tokens, own in zip(data["input_ids"].unbind(), routes, strict=True):
        wanted.update(enumerate(own.long().unbind(1)))
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0] / data["temperature"]
        found.append(logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0])
    return found


def scored(folder: Path, mode: str, data: TensorDict) -> dict[str, Any]:
    """What the engine gives for a batch in ``eval_mode``."""
    config = dataclasses.replace(
        our_engine(), router_replay=EngineRouterReplayConfig(mode=mode), max_token_len_per_gpu=32
    )
    engine = worker(folder, "ppo", config).engine
    with engine.eval_mode():
        return engine.forward_backward_batch(data.clone(), None, forward_only=True)["model_output"]  # type: ignore[no-any-return]


def difference(output: dict[str, Any], expected: list[Tensor]) -> float:
    pairs = zip(output["log_probs"].unbind(), expected, strict=True)
    return max(float((ours[:-1] - theirs).abs().max()) for ours, theirs in pairs)


def main() -> None:
    folder, moved = Path(sys.argv[1]) / "experts", Path(sys.argv[1]) / "moved"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        make_model(folder)
        move_routers(folder, moved)
    dist.barrier()
    data, routes = batch()
    expected = alone(folder, data, routes)
    replayed, own = (
        difference(scored(folder, "R3", data), expected),
        difference(scored(folder, "disabled", data), expected),
    )
    assert replayed < 1e-5, f"replayed routes differ by {replayed}"
    assert own > 1e-4, f"without replay they differ by {own} alone"

    without = data.exclude("routed_experts")
    found = scored(folder, "R2", without)
    recorded = [own.long() for own in found["routed_experts"].unbind()]  # of the layers that have experts
    whole = [torch.cat([own[:, :1], own], dim=1) for own in recorded]
    assert difference(found, alone(folder, data, whole)) < 1e-5, "the recorded routes are not those of the pass"
    without["routed_experts"] = found["routed_experts"]
    expected = alone(moved, data, whole)
    again, own = (
        difference(scored(moved, "R2", without), expected),
        difference(scored(moved, "disabled", data), expected),
    )
    assert again < 1e-5, f"recorded routes that are played back differ by {again}"
    assert own > 1e-4, f"without them they differ by {own} alone"
    if dist.get_rank() == 0:
        print(f"routes of rollouts and of scoring: within {max(replayed, again):.1e} of plain transformers", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
