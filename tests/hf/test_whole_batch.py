"""Batches of all ranks behind other people's trainers: losses of their own sequences, in one pass and in two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bytescale
from bytescale.integrations.whole_batch import LOG_PROBS, WholeBatch, word_columns
from tests.helpers.effort import one_of

from .support import on_ranks, small_model

LENGTHS = ([37, 2, 21], [8, 60], [5], [12, 6])
MESHES = [(2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 1, 2)]
"""Ranks, tensor-parallel ranks and stages among them."""
PREFIX = 5
"""Tokens that the second and the fourth sequence have in common."""


def fields_of(rank: int) -> dict[str, list[Tensor]]:
    """A rank's sequences; a number for each of them, and one for each of their tokens but the first."""
    generator = torch.Generator().manual_seed(rank)
    tokens = [torch.randint(1, 64, (length,), generator=generator) for length in LENGTHS[rank]]
    tokens[-1][:PREFIX] = torch.arange(PREFIX)
    return {
        "tokens": tokens,
        "labels": [torch.cat([own[1:], torch.tensor([-100])]) for own in tokens],
        "reward": [torch.tensor(len(own) / 30.0 - 1.0, dtype=torch.float64) for own in tokens],
        "old": [-4.2 + torch.randn(len(own) - 1, generator=generator, dtype=torch.float64) for own in tokens],
    }


def of_sequences(documents: list[dict[str, Tensor]], values: list[Tensor]) -> Tensor:
    """A ratio of each sequence, and its entropies: a sum over sequences."""
    ratios = [(v[:-1, LOG_PROBS] - d["old"]).mean().exp() for d, v in zip(documents, values, strict=True)]
    gains = [d["reward"] * ratio.clamp(0.8, 1.2) for d, ratio in zip(documents, ratios, strict=True)]
    return -torch.stack(gains).sum() - 0.1 * sum(own[:, 1].mean() for own in values)


def of_batch(documents: list[dict[str, Tensor]], values: list[Tensor]) -> Tensor:
    return of_sequences(documents, values) / len(documents)


def run(
    loss: Any, given: Any, num_ranks: int = 2, tp: int = 1, pp: int = 1
) -> tuple[list[float], list[dict[str, Tensor]], list[bool]]:
    """Losses of the ranks, their gradients, and whether a second pass ran."""

    def work(group: dist.ProcessGroup, model: nn.Module) -> tuple[float, dict[str, Tensor], bool]:
        hdp = bytescale.HDP(model, group, capacity_tokens=40 * tp * pp, tp=tp, pp=pp)
        hdp.adamw(lr=0.0)
        own = fields_of(group.rank())
        batch = WholeBatch(hdp, word_columns(model, count=2), num_trained=2)
        values, _ = batch.run(own, loss=given)
        rows = [{name: column[place] for name, column in own.items()} for place in range(len(own["tokens"]))]
        total = loss(rows, list(values.split(LENGTHS[group.rank()])))
        total.backward()
        ran_again = batch.finish()
        return float(total.detach()), hdp.gradients(), ran_again

    losses, gradients, again = zip(*on_ranks(num_ranks, small_model("llama"), work), strict=True)
    return list(losses), list(gradients), list(again)


@pytest.mark.parametrize(
    ("loss", "again", "mesh"),
    one_of(
        [(loss, again, mesh) for loss, again in ((of_sequences, False), (of_batch, True)) for mesh in MESHES],
        (of_sequences, False, MESHES[0]),
    ),
)
def test_one_pass_is_two_passes(loss: Any, again: bool, mesh: tuple[int, int, int]) -> None:
    """A sequence of 60 tokens is shared by both ranks. A mean over a rank's batch takes a second pass.

    Llama's norms compute in fp32, so that the gradients of two backwards do not add up to those of one in fp64.
    """
    losses, gradients, ran_again = run(loss, loss, *mesh)
    wanted, theirs, ran_twice = run(loss, None, *mesh)
    assert losses == pytest.approx(wanted, rel=1e-12)
    assert ran_again == [again] * mesh[0]
    assert ran_twice == [True] * mesh[0]
    for name, gradient in theirs[0].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-10, atol=1e-7 if again else 1e-12)


@pytest.mark.parametrize(
    ("mesh", "given"),
    one_of([(mesh, given) for mesh in MESHES for given in (of_sequences, None)], (MESHES[3], of_sequences)),
)
def test_a_loss_of_sequences_is_that_of_one_process(mesh: tuple[int, int, int], given: Any) -> None:
    """With tp or pp, each rank has sequences of its own all the same; in one pass, and in two."""
    losses, gradients, _ = run(of_sequences, given, *mesh)
    model = small_model("llama")
    documents, values = [], []
    for rank in range(mesh[0]):
        own = fields_of(rank)
        for place, tokens in enumerate(own["tokens"]):
            documents.append({name: column[place] for name, column in own.items()})
            log_p = model(tokens[None]).logits[0].log_softmax(1)
            chosen = torch.cat([log_p[:-1].gather(1, tokens[1:, None])[:, 0], log_p.new_zeros(1)])
            entropy = -(log_p.exp() * log_p).sum(1) * (torch.arange(len(tokens)) < len(tokens) - 1)
            values.append(torch.stack([chosen, entropy], dim=1))
    total = of_sequences(documents, values)
    total.backward()
    assert sum(losses) == pytest.approx(float(total.detach()), rel=1e-10)
    for found in gradients:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-8, atol=1e-10)
