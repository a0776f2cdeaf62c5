"""Keys that are chosen for each query: the choice and the results are those of one process, under any plan."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from bytescale import HDP
from bytescale.attention import earlier
from bytescale.common.errors import ConfigError
from bytescale.hf.model import selectors
from bytescale.hf.model.selectors import Indexer, LowestFirst
from bytescale.parity import Setup, compare, small_model
from bytescale.parity.compare import WideCasts, difference, plain_step, planned_step, random_documents
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from tests.helpers.effort import examples, one_of

from .support import documents, on_ranks, parameters_of, plain_update, printed_loop
from .test_prefixes import OTHER_WAYS

EXACT = 1e-10
FAMILIES = ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text")
DEEPER: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"num_hidden_layers": 4},
    "glm_moe_dsa": {"num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2},
    "minimax_m3_vl_text": {"num_hidden_layers": 4, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
}


@examples(quick=4, rest=80)
@given(
    family=st.sampled_from(FAMILIES),
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=4),
    num_keys=st.integers(1, 50),
    num_ranks=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_any_lengths_and_numbers_of_keys(
    family: str, lengths: list[int], num_keys: int, num_ranks: int, seed: int
) -> None:
    """Documents of one token, and such as are shorter than the number of keys, whole or on several ranks."""
    model = small_model(family, index_topk=num_keys, index_topk_blocks=1 + num_keys // 8, seed=seed)
    setup = Setup(num_ranks=num_ranks, lengths=(*lengths, 9), seed=seed)
    assert compare(model, setup).worst <= EXACT


@pytest.mark.parametrize("way", one_of(OTHER_WAYS, quick={"checkpointing": "attention"}), ids=str)
@pytest.mark.parametrize("family", one_of(FAMILIES, quick="glm_moe_dsa"))
def test_a_step_however_activations_and_parameters_are_held(
    family: str, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, gradients, and weights after an update. With kept attention no layer chooses twice."""
    chosen: list[tuple[Any, nn.Module]] = []
    choose = Indexer.choose

    def counted(self: Indexer, *args: Any) -> Tensor:
        chosen.append((self.cache.target, self.module))
        return choose(self, *args)

    monkeypatch.setattr(Indexer, "choose", counted)
    model, batch = small_model(family, **DEEPER[family]), documents([50, 3, 17, 1])
    reference, unclipped = copy.deepcopy(model), copy.deepcopy(model)
    with WideCasts(), LowestFirst():
        plain_update(unclipped, batch, torch.optim.SGD(unclipped.parameters(), lr=0.0), float("inf"))
        wanted = plain_update(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-2), 0.5)

    def work(group: dist.ProcessGroup, own: nn.Module) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        hdp = HDP(own, group, capacity_tokens=40, **way)
        hdp.adamw(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
        with WideCasts():
            loss = printed_loop(hdp, own, batch)
            gradients = hdp.gradients()
            hdp.step(max_grad_norm=0.5)
        return loss, gradients, {} if "shard" in way else parameters_of(own)

    results = on_ranks(2, model, work)
    assert sum(loss for loss, *_ in results) == pytest.approx(wanted, rel=EXACT)
    with_gradient = {name: p.grad for name, p in unclipped.named_parameters() if p.grad is not None}
    for _, gradients, weights in results:
        for name, value in with_gradient.items():
            torch.testing.assert_close(gradients[name], value, rtol=0, atol=EXACT, msg=name)
        for name, value in weights.items():
            torch.testing.assert_close(value, reference.get_parameter(name), rtol=0, atol=1e-8, msg=name)
    if way == {"checkpointing": "attention"}:
        assert len(chosen) == len({(id(target), id(module)) for target, module in chosen}) > 0, (
            "a layer chose twice in a micro-batch"
        )


@pytest.mark.exhaustive
def test_adapters_on_what_expands_latents_have_their_gradients() -> None:
    model = get_peft_model(
        small_model("deepseek_v32"), LoraConfig(r=4, target_modules=["kv_b_proj", "q_b_proj", "o_proj"], lora_alpha=8)
    ).double()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    reference, batch = copy.deepcopy(model), documents([40, 3, 17])
    with WideCasts(), LowestFirst():
        optimizer = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.0)
        wanted = plain_update(reference, batch, optimizer, float("inf"))

    def work(group: dist.ProcessGroup, own: nn.Module) -> tuple[float, dict[str, Tensor]]:
        hdp = HDP(own, group, capacity_tokens=30)
        hdp.adamw(lr=0.0)
        with WideCasts():
            return printed_loop(hdp, own, batch), hdp.gradients()

    results = on_ranks(2, model, work)
    assert sum(loss for loss, _ in results) == pytest.approx(wanted, rel=EXACT)
    with_gradient = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert any("kv_b_proj.lora_A" in name for name in with_gradient)
    for name, value in with_gradient.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=0, atol=EXACT, msg=name)


def _arange_first(self: nn.Module, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    """The first keys, which is what the lowest position among equal scores means."""
    return torch.arange(min(4, hidden.shape[1]), dtype=torch.int32).expand(1, hidden.shape[1], -1)


@pytest.fixture
def tied() -> nn.Module:
    """All scores are 0."""
    model = small_model("deepseek_v32")
    for layer in model.model.layers:  # type: ignore[union-attr]
        nn.init.zeros_(layer.self_attn.indexer.weights_proj.weight)
    return model


def _against_the_first_keys(model: nn.Module) -> float:
    setup, plain = Setup(num_ranks=3, seed=1), copy.deepcopy(model)
    batch = random_documents(model, setup)
    for layer in plain.model.layers:  # type: ignore[union-attr]
        layer.self_attn.indexer.forward = _arange_first.__get__(layer.self_attn.indexer)
    return difference(plain_step(plain, batch), planned_step(model, batch, setup)).worst


def test_among_equal_scores_the_lowest_position_wins(tied: nn.Module) -> None:
    assert _against_the_first_keys(tied) <= EXACT


def test_another_rule_for_ties_is_caught(tied: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def highest(scores: Tensor, k: int, dim: int = -1, **_: Any) -> Any:
        values, places = scores.flip(dim).sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], scores.shape[dim] - 1 - places[..., :k]))

    monkeypatch.setattr(selectors, "_topk", highest)
    assert _against_the_first_keys(tied) > 1e-6


def test_a_choice_among_one_ranks_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = earlier.Path.__init__

    def local(self: earlier.Path, rows: slice, before: Sequence[tuple[int, int]]) -> None:
        whole(self, rows, [])

    model, setup = small_model("deepseek_v32"), Setup(num_ranks=3, seed=1)
    assert compare(model, setup).worst <= EXACT
    monkeypatch.setattr(earlier.Path, "__init__", local)
    assert compare(model, setup).worst > 1e-6


def test_of_latents_and_index_keys_as_many_bytes_travel_as_the_formula_says() -> None:
    """Two ranks have the segments a, d and b, c of a document: each sends what later rows of the other need."""
    model, lengths = small_model("deepseek_v32"), [40]
    plan = Plan.build(
        lengths=lengths,
        capacity_tokens=[40, 40],
        groups=[GroupSpec(sequences=[0], ranks=[0, 1])],
        schedule=[[[0]], [[0]]],
    )

    def work(group: dist.ProcessGroup, own: nn.Module) -> int:
        hdp = HDP(own, group, capacity_tokens=40)
        hdp.adamw(lr=0.0)
        before = hdp.group.exchange.bytes_sent
        for micro in hdp.plan(documents(lengths), plan=plan):
            micro.loss_sum(own).backward()
        return hdp.group.exchange.bytes_sent - before

    latents, index = 16 + 4, 8
    rows = 10 + 20  # a to the rank with b and c; b and c to the rank with d
    bytes_per_layer = 8 * rows * (index + 3 * latents)  # forward, backward again, and gradients home
    assert sum(on_ranks(2, model, work)) == 2 * bytes_per_layer


def test_outside_of_plans_a_model_computes_as_before() -> None:
    model = small_model("deepseek_v32").eval()
    tokens = torch.arange(2, 32)[None]
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        hdp = HDP(model, capacity_tokens=64)
        torch.testing.assert_close(model(input_ids=tokens).logits, before, rtol=0, atol=0)
        hdp.detach()
        torch.testing.assert_close(model(input_ids=tokens).logits, before, rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in model.parameters())
    HDP(model, capacity_tokens=64)  # again


def test_another_number_of_keys_after_attaching_is_refused() -> None:
    model = small_model("deepseek_v32")
    hdp = HDP(model, capacity_tokens=64)
    hdp.adamw(lr=0.0)
    model.model.layers[0].self_attn.indexer.index_topk = 2  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="index_topk, which was 4, is 2"):
        printed_loop(hdp, model, documents([9]))
