"""Norms that keep their input alone: the numbers of transformers' own, with less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from bytescale.hf.model.counting import LiveBytes
from bytescale.hf.model.norms import RMSNorm, replace_norms
from bytescale.parity import small_model


def passed(model: torch.nn.Module) -> tuple[float, dict[str, Tensor], int]:
    tokens = torch.arange(48)[None] % 61
    with LiveBytes() as live:
        logits = model(tokens, use_cache=False).logits
        kept = live.now
        loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:])
        loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, kept


@pytest.mark.parametrize(("name", "number"), [("llama", 5), ("qwen3", 9), ("mixtral", 5), ("gemma2", 0), ("gpt2", 0)])
def test_a_model_computes_what_it_has_computed(name: str, number: int) -> None:
    """Gemma adds one to its weights, and GPT-2 subtracts a mean: theirs stay."""
    model = small_model(name, dtype=torch.float32).train()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.dim() == 1):
            parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    other = copy.deepcopy(model)
    assert replace_norms(other) == number
    loss, gradients, kept = passed(model)
    own_loss, own_gradients, own_kept = passed(other)
    assert own_loss == pytest.approx(loss, rel=1e-6)
    assert own_kept < kept or not number
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for key, gradient in gradients.items():
        torch.testing.assert_close(own_gradients[key], gradient, rtol=1e-4, atol=1e-6 * largest)


def test_gradients_are_those_of_the_formula() -> None:
    rows = torch.randn(3, 5, 8, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)
    plain = rows * (rows.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    upstream = torch.randn(3, 5, 8)
    expected = torch.autograd.grad(plain, [rows, weight], upstream)
    found = torch.autograd.grad(RMSNorm.apply(rows, weight, 1e-5), [rows, weight], upstream)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_models_in_double_precision_keep_theirs() -> None:
    assert replace_norms(small_model("llama", dtype=torch.float64)) == 0


def test_a_norm_of_another_stage_says_nothing_of_its_class() -> None:
    """It has no numbers, and all norms are alike on rows without any."""
    model = small_model("qwen3_next", dtype=torch.float32)
    norms = [module for module in model.modules() if type(module).__name__ == "Qwen3NextRMSNorm"]
    with torch.no_grad():
        norms[0].weight.data = norms[0].weight.new_empty(0)
    replace_norms(model)
    assert not any("forward" in vars(norm) for norm in norms)
