"""Experts in parallel inside a lockstep domain: the numbers of one process, wherever the router sends tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import bytescale
from bytescale.common.errors import ConfigError
from bytescale.parity.compare import Setup, compare
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.group import RankGroup
from tests.helpers.effort import one_of

from .support import documents, on_ranks, printed_loop, small_model
from .test_sharing import LENGTHS, scores_prefill_and_gradients, updates

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe")
ALL = [
    (name, ranks, domain, seed) for name in FAMILIES for ranks, domain in ((2, 2), (4, 2), (4, 4)) for seed in range(3)
]


def parallel(model: nn.Module, group: dist.ProcessGroup, domain: int, **options: Any) -> bytescale.HDP:
    """Experts in parallel in domains of so many ranks; the plain model in one process for a domain of 1."""
    given: dict[str, Any] = {"capacity_tokens": 60, **options}
    if domain > 1:
        given |= {"shard": "parameters", "domain": domain, "experts": "parallel"}
    return bytescale.HDP(model, group, **given)


@pytest.mark.parametrize(
    ("name", "num_ranks", "domain", "seed"),
    [("gpt_oss", 4, 2, 1), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ALL)],
)
def test_gradients_are_those_of_one_process(name: str, num_ranks: int, domain: int, seed: int) -> None:
    setup = Setup(num_ranks=num_ranks, domain=domain, seed=seed, lengths=tuple(LENGTHS), experts="parallel")
    assert compare(small_model(name), setup).worst < 1e-10


def lonely(num_ranks: int) -> Plan:
    """The second rank has all the work, and the others none in any round."""
    lengths = [20, 9]
    return Plan.build(
        lengths=lengths,
        capacity_tokens=[60] * num_ranks,
        groups=[GroupSpec(sequences=[n], ranks=[1]) for n in range(2)],
        schedule=[[[0], [1]] if rank == 1 else [] for rank in range(num_ranks)],
        domain=num_ranks,
    )


def favour(model: Any, rank: int) -> None:
    """Let the routers of a model of 8 experts send every token to the two that one of four ranks has."""
    model.model.embed_tokens.weight.data[0] = model.model.embed_tokens.weight[2].detach()  # of rows that are no token
    for layer in model.model.layers:
        with torch.no_grad():
            wanted = (torch.arange(8) // 2 == rank).to(torch.float64)
            layer.mlp.gate.weight[:] = 0.1 * layer.mlp.gate.weight + wanted[:, None]
        layer.post_attention_layernorm.register_forward_hook(lambda module, args, out: out.abs())


@pytest.mark.parametrize("checkpointing", one_of(["none", "full", "attention", "hugging face", "offload"], "full"))
@pytest.mark.parametrize("rank", one_of([0, 1, 3], 3))
def test_all_tokens_go_to_one_rank(checkpointing: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks without a token, and ranks to which none comes, take part in all messages, whose bytes are the formula's.

    A token is sent once for each of its experts on another rank, there and back, in forward, in each recomputation and
    in backward; and in forward, every rank tells every other one how many come for each of its experts.
    """
    model = small_model("qwen3_moe", num_hidden_layers=3, num_local_experts=8)
    favour(model, rank)
    batch, num_sent = documents([20, 9]), [0] * 4
    plain = RankGroup.all_to_all

    def counted(self: RankGroup, rows: Tensor, sent: Any, received: Any) -> Tensor:
        num_sent[self.rank] += rows[0:1].nbytes * (sum(sent) - sent[self.rank])
        return plain(self, rows, sent, received)

    def work(group: Any, own: Any, domain: int) -> dict[str, Tensor]:
        if checkpointing == "hugging face":
            own.gradient_checkpointing_enable()
        kind: Any = checkpointing if checkpointing in ("full", "attention") else "none"
        hdp = parallel(own, group, domain, checkpointing=kind, host_gib=0.25 * (checkpointing == "offload"))
        hdp.optimizer(torch.optim.SGD, lr=0.0)
        printed_loop(hdp, own, batch, plan=lonely(domain) if domain > 1 else None)
        return hdp.gradients()

    wanted = on_ranks(1, model, lambda group, own: work(group, own, 1))[0]
    monkeypatch.setattr(RankGroup, "all_to_all", counted)
    for gradients in on_ranks(4, model, lambda group, own: work(group, own, 4)):
        for name, value in wanted.items():
            torch.testing.assert_close(gradients[name], value, rtol=1e-10, atol=1e-12)
    forwards, layers, chosen, row = 1 if checkpointing in ("none", "offload") else 2, 3, 2, 8 * 32
    for own in range(4):
        rows = [chosen * (20 + 9 if other == 1 else 2) for other in range(4)]  # one stands for no token, twice
        away = rows[own] if own != rank else sum(rows) - rows[own]
        assert num_sent[own] == layers * ((forwards + 1) * row * away + forwards * 2 * 8 * 2 * 3)


def test_any_domain_continues_what_another_has_begun(tmp_path: Path) -> None:
    """Clipped updates, from four ranks in one domain to plain training on two ranks."""
    model = small_model("qwen3_moe")

    def train(group: Any, own: nn.Module, domain: int, seeds: range, read: bool) -> tuple[list[float], Any, Any]:
        hdp = parallel(own, group, domain)
        hdp.adamw(lr=1e-2)
        if read:
            hdp.load_state(torch.load(tmp_path / "state"))
        norms = updates(hdp, own, seeds)
        state, weights = hdp.state(), {name: value.clone() for name, value in hdp.weights()}
        hdp.detach()
        if group.rank() == 0:
            torch.save(state, tmp_path / "state")
        return norms, state, (weights, {name: p.detach().clone() for name, p in own.named_parameters()})

    norms = []
    for number, (ranks, domain) in enumerate(((4, 4), (2, 1))):
        results = on_ranks(ranks, model, lambda g, m: train(g, m, domain, range(number, number + 1), number > 0))  # noqa: B023
        norms += results[0][0]
        state, (weights, whole) = results[-1][1:]
        for name, states in state["tensors"].items():
            assert torch.equal(states["master"], whole[name])
        merged = dict(bytescale.HDP(small_copy(model, whole), capacity_tokens=60).weights())
        assert weights.keys() == merged.keys()
        assert all(torch.equal(weights[name], value) for name, value in merged.items())
    wanted, final, _ = on_ranks(1, model, lambda group, own: train(group, own, 1, range(2), False))[0]
    assert norms == pytest.approx(wanted, rel=1e-9)
    for name, states in final["tensors"].items():
        for kind, value in states.items():
            torch.testing.assert_close(state["tensors"][name][kind], value, rtol=1e-8, atol=1e-10)


def small_copy(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    fresh = small_model("qwen3_moe")
    fresh.load_state_dict({**model.state_dict(), **weights})
    return fresh


@pytest.mark.exhaustive
def test_adapters_are_trained_beside_frozen_experts() -> None:
    """Also below the first adapter, where nothing has a gradient; and scoring, prefill and losses of documents."""
    model = get_peft_model(
        small_model("qwen3_moe", num_hidden_layers=3),
        LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj"], layers_to_transform=[1, 2]),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    batch = documents(LENGTHS)

    def train(group: Any, own: nn.Module, domain: int) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
        hdp = parallel(own, group, domain, checkpointing="full")
        hdp.adamw(lr=1e-2)
        updates(hdp, own, range(2))
        return scores_prefill_and_gradients(hdp, own, batch)

    their_scores, their_tokens, wanted = on_ranks(1, model, lambda group, own: train(group, own, 1))[0]
    for scores, tokens, gradients in on_ranks(4, model, lambda group, own: train(group, own, 2)):
        assert torch.equal(tokens, their_tokens)
        pairs = [*zip(scores, their_scores, strict=True), *((gradients[name], wanted[name]) for name in wanted)]
        for ours, value in pairs:
            torch.testing.assert_close(ours, value.to(ours), rtol=1e-7, atol=1e-8)


def test_what_cannot_be_in_parallel_is_told() -> None:
    adapters = LoraConfig(r=2, lora_dropout=0.0, target_parameters=["experts.gate_up_proj"])
    adapted = get_peft_model(small_model("qwen3_moe"), adapters)  # type: ignore[arg-type]
    dense = small_model("llama")  # ranks are threads, and making a model changes the default dtype of all of them

    def refused(group: dist.ProcessGroup, own: nn.Module) -> None:
        plain, shared = {"capacity_tokens": 60}, {"capacity_tokens": 60, "shard": "parameters", "domain": 3}
        for given, options, message in (
            (own, {**plain, "experts": "parallel"}, r"xperts is .parallel., but shard is .optimizer."),
            (own, {**shared, "experts": "spread"}, r"xperts is 'spread'.*use one of gathered, parallel"),
            (own, {**shared, "experts": "parallel"}, r"domain of 3 ranks does not divide the 4 experts of Qwen3MoeExp"),
            (copy.deepcopy(dense), {**shared, "experts": "parallel"}, r"has no mixture of experts"),
            # Before its memory is measured, in which it would have no room.
            (copy.deepcopy(dense), {**shared, "experts": "parallel", "device_gib": 1e-6}, r"has no mixture of experts"),
            (copy.deepcopy(adapted), {**shared, "experts": "parallel"}, r"and which have no adapters"),
        ):
            with pytest.raises(ConfigError, match=message):
                bytescale.HDP(given, group, **options)  # type: ignore[arg-type]

    on_ranks(3, small_model("qwen3_moe"), refused)
