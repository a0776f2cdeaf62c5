"""The loss through any head, a few rows at a time, against all logits at once and autograd."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import bytescale
from bytescale.common.errors import DataError
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.head import _used_rows, hidden_states
from bytescale.parity import small_model
from bytescale.runtime.loss import PlainHead, loss_sum, token_losses

from .support import documents, on_ranks


def slow_twin(logits: Tensor, labels: Tensor, z_loss: float, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    losses = losses + z_loss * logits.logsumexp(dim=1).where(labels != -100, 0).square()
    return (losses * weights).sum()


@pytest.mark.parametrize("name", ["gemma2", "granite", "gpt2", "phi"])
def test_loss_and_gradients_are_those_of_all_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft cap, scale, a tied head and a head with a bias."""
    monkeypatch.setattr("bytescale.runtime.loss.loss_chunk_tokens", lambda words, kind: 7)
    model = small_model(name)
    tokens = documents([40])[0]["tokens"][None]
    labels, weights = torch.roll(tokens[0], -1), torch.linspace(-1.0, 2.0, 40, dtype=torch.float64)
    labels[::4] = -100

    expected = slow_twin(model(input_ids=tokens).logits[0], labels, 1e-2, weights) / 3
    expected.backward()
    reference = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    hidden, head = hidden_states(model, {"input_ids": tokens, "use_cache": False})
    loss = loss_sum(head, hidden[0], labels, z_loss=1e-2, token_weights=weights) / 3
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for key, parameter in model.named_parameters():
        if key in reference:
            torch.testing.assert_close(parameter.grad, reference[key], rtol=1e-6, atol=1e-8)
    losses = F.cross_entropy(model(input_ids=tokens).logits[0], labels, ignore_index=-100, reduction="none")
    with torch.no_grad():
        torch.testing.assert_close(token_losses(head, hidden[0], labels), losses)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "granite", "lora"])
def test_loss_sum_of_micro_batches_gives_the_gradients_of_one_process(name: str, num_ranks: int) -> None:
    """A plain head, a tied one, heads with a cap and a scale, and a frozen head with an adapter that begins at zero."""
    model = small_model("llama" if name == "lora" else name)
    if name == "lora":
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "lm_head"]))
        model.to(torch.float64).train()
    batch = documents([37, 1, 8, 3, 20])
    reference = copy.deepcopy(model)
    total = sum(float(d["weights"].sum()) for d in batch)
    expected = 0.0
    for document in batch:
        logits = reference(input_ids=document["tokens"][None]).logits[0]
        labels = torch.cat([document["tokens"][1:], torch.tensor([-100])])
        losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        loss = (document["weights"] * losses).sum() / total
        loss.backward()
        expected += float(loss.detach())

    def work(group: Any, own: nn.Module) -> tuple[float, dict[str, Tensor]]:
        hdp = bytescale.HDP(own, group, capacity_tokens=90 // num_ranks)
        hdp.adamw(lr=0.0)
        loss_sum = 0.0
        for micro in hdp.plan(batch):
            loss = micro.loss_sum(own) / total
            loss.backward()
            loss_sum += float(loss.detach())
        return loss_sum, hdp.gradients()

    results = on_ranks(num_ranks, model, work)
    assert sum(loss for loss, _ in results) == pytest.approx(expected, rel=1e-8)  # Gemma computes norms in fp32
    for key, parameter in reference.named_parameters():
        if parameter.requires_grad:
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(results[0][1][key], wanted, rtol=0, atol=1e-5 if name == "gemma2" else 1e-10)


def test_weights_of_loss_sum_are_constants_of_the_rows() -> None:
    model = small_model("llama")
    hdp = bytescale.HDP(model, capacity_tokens=100)
    (micro,) = hdp.plan(documents([9]))
    with pytest.raises(DataError, match=r"weights of shape \[8\]"):
        micro.loss_sum(model, micro.weights[1:])
    with pytest.raises(DataError, match="requires_grad=True"):
        micro.loss_sum(model, micro.weights.clone().requires_grad_())
    loss = micro.loss_sum(model, torch.ones(9))
    torch.testing.assert_close(loss, -micro.logprobs(model).sum())


@pytest.mark.parametrize(
    ("name", "plain", "changes"),
    [
        ("qwen3", True, {}),
        ("gpt2", True, {}),
        ("gemma2", False, {}),
        ("gemma2", False, {"final_logit_softcapping": 100.0}),
        ("granite", False, {}),
        ("phi", False, {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_head_is_plain_if_it_is_one_product(
    name: str, plain: bool, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    model = small_model(name, **changes).to(dtype)
    assert isinstance(HFDecoder(model, longest_document=64).head, PlainHead) == plain


def test_rows_of_weight_0_whose_loss_is_infinite() -> None:
    """A head that excludes a word gives its rows infinite losses, which reach neither the sum nor a gradient."""
    batch = documents([40, 9])
    for document in batch:
        after = torch.cat([document["tokens"][1:], torch.tensor([-100])])
        document["weights"] = document["weights"].where(after != 5, 0)
        document["tokens"][3] = 5
        document["weights"][2] = 0
    model = small_model("phi")
    with torch.no_grad():
        model.lm_head.bias[5] = -torch.inf

    def plain(own: nn.Module) -> list[Tensor]:
        for document in batch:
            logits = own(input_ids=document["tokens"][None]).logits[0, :-1]
            losses = F.cross_entropy(logits, document["tokens"][1:], reduction="none")
            counted = document["weights"][:-1] != 0
            (document["weights"][:-1] * losses)[counted].sum().backward()
        return [parameter.grad for parameter in own.parameters()]

    def by_loss_sum(micro: Any, own: nn.Module) -> Tensor:
        return micro.loss_sum(own)

    def by_logprobs(micro: Any, own: nn.Module) -> Tensor:
        logprobs = micro.logprobs(own)
        assert bool((logprobs[micro.labels == 5] == -torch.inf).all()), "what the model says is not changed"
        return -(micro.weights * logprobs)[(micro.weights != 0) & (micro.labels != -100)].sum()

    wanted = plain(copy.deepcopy(model))
    for loss in (by_loss_sum, by_logprobs):
        own = copy.deepcopy(model)
        hdp = bytescale.HDP(own, capacity_tokens=60)
        for micro in hdp.plan(batch):
            value = loss(micro, own)
            assert bool(value.isfinite())
            value.backward()
        for found, parameter in zip(wanted, own.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, found, rtol=0, atol=1e-10)


def test_a_row_that_no_loss_uses_gives_no_gradient_to_infinite_logits() -> None:
    hidden = torch.randn(3, 4, dtype=torch.float64).requires_grad_()
    weight = torch.randn(5, 4, dtype=torch.float64)
    factor = torch.tensor([1.0, 1e308, 1.0], dtype=torch.float64)[:, None]
    logits = (hidden @ weight.T * factor) * factor.sqrt()  # infinite in row 1
    lse = logits.logsumexp(dim=1)
    chosen, entropy = _used_rows(logits, logits[:, 0] - lse, lse - (logits.softmax(dim=1) * logits).sum(dim=1))
    assert chosen is not None
    assert entropy is not None
    (chosen[::2].sum() + entropy[2:].sum()).backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())
    assert not hidden.grad[1].any()
    assert bool(hidden.grad[0].any())


@pytest.mark.parametrize("with_adapters", [False, True])
def test_a_head_that_is_trained_alone(with_adapters: bool) -> None:
    """What layers keep is measured, which is nothing, and gradients are those of one process."""
    plain = small_model("llama")
    model: Any = copy.deepcopy(plain)
    if with_adapters:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    else:
        model.model.requires_grad_(False)
    reference, batch = copy.deepcopy(model), documents([40, 9])
    hdp = bytescale.HDP(model, capacity_tokens="auto", device_gib=0.01)
    assert hdp.capacity_tokens > 1000
    memory = hdp.room.memory
    assert memory is not None
    assert memory.rows.saved_per_token < 64 * 8, "hidden states at most"
    hdp.adamw(lr=0.0)
    for micro in hdp.plan(batch):
        micro.loss_sum(model).backward()
    found = hdp.gradients()
    for document in batch:
        logits = reference(input_ids=document["tokens"][None]).logits[0, :-1]
        losses = F.cross_entropy(logits, document["tokens"][1:], reduction="none")
        (document["weights"][:-1] * losses).sum().backward()
    trained = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    assert trained.keys() == found.keys()
    for name, gradient in trained.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10)


def test_adapters_of_a_tied_head_that_ranks_share() -> None:
    """Nothing is trained below the head, whose weight is the embedding's and is open where either is."""
    batch = documents([20, 9, 5])

    def work(group: Any, base: nn.Module, shard: Any) -> dict[str, Tensor]:
        hdp = bytescale.HDP(base, group, capacity_tokens=20, shard=shard, domain=2 if shard == "parameters" else None)
        hdp.adamw(lr=0.0)
        for _ in range(2):
            for micro in hdp.plan(batch):
                micro.logprobs(base).sum().backward()
            found = hdp.gradients()
            hdp.step()
        return found

    adapters = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    model: Any = get_peft_model(small_model("qwen3"), adapters)  # type: ignore[arg-type]
    whole, shared = (on_ranks(2, model, partial(work, shard=shard))[0] for shard in ("optimizer", "parameters"))
    assert whole.keys() == shared.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(shared[name], gradient, rtol=0, atol=1e-12)
