"""The loss through any head, a few rows at a time, against all logits at once and autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bytescale.attach.head import hidden_states, loss_sum, row_log_probabilities
from bytescale.attach.part import AttachedPart
from bytescale.parity import small_model

from .support import documents


def slow_twin(logits: Tensor, labels: Tensor, z_loss: float, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    losses = losses + z_loss * logits.logsumexp(dim=1).where(labels != -100, 0).square()
    return (losses * weights).sum()


@pytest.mark.parametrize("name", ["gemma2", "granite", "gpt2", "phi"])
def test_loss_and_gradients_are_those_of_all_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft cap, scale, a tied head and a head with a bias."""
    monkeypatch.setattr("bytescale.attach.head.loss_chunk_tokens", lambda words, kind: 7)
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
        torch.testing.assert_close(-row_log_probabilities(head, hidden[0], labels), losses)


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
    assert AttachedPart(model, longest_document=64).has_plain_head == plain
