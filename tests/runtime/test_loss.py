"""The chunked cross-entropy against all logits at once."""

from __future__ import annotations

import pytest
import torch

from bytescale.runtime import IGNORE_INDEX, linear_cross_entropy, loss
from bytescale.runtime.loss import reference_cross_entropy


def inputs(dtype: torch.dtype, tokens: int = 50, width: int = 12, vocab: int = 37) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[::3] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def gradients(function, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    value = function(hidden, weight, labels)
    return [value.detach(), *torch.autograd.grad(value * 0.25, (hidden, weight))]


# fp64 differs in the order of sums only; bf16 rounds each logit's gradient to 8 bits in both.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
@pytest.mark.parametrize("chunk_logits", [1, 37 * 7, 2**22])
def test_loss_and_gradients(
    dtype: torch.dtype, tolerance: float, chunk_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "_CHUNK_LOGITS", chunk_logits)
    hidden, weight, labels = inputs(dtype)
    ours = gradients(linear_cross_entropy, hidden, weight, labels)
    reference = gradients(reference_cross_entropy, hidden, weight, labels)
    for got, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tokens", [0, 5])
def test_no_valid_target_gives_zero_loss_and_zero_gradients(tokens: int) -> None:
    hidden, weight, labels = inputs(torch.float32, tokens=tokens)
    labels.fill_(IGNORE_INDEX)
    value, d_hidden, d_weight = gradients(linear_cross_entropy, hidden, weight, labels)
    assert value == 0
    assert not d_hidden.any()
    assert not d_weight.any()


def test_without_gradients_only_the_loss_is_made() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.no_grad():
        ours = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(ours, reference_cross_entropy(hidden, weight, labels).detach())
