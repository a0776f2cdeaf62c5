"""Micro-batches without rows or without documents: everything that a loop may do with one, and the numbers of one rank.

A rank has no rows of a document that ranks share and that has fewer tokens than members, and no documents in the rounds
that its lockstep domain runs and it does not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bytescale
from bytescale.integrations.whole_batch import WholeBatch, word_columns
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from tests.helpers.effort import one_in, one_of, pairs

from .support import documents, on_ranks, small_model

Hdp = bytescale.HDP
Loop = Callable[[Hdp, nn.Module, list[dict[str, Any]], Any], None]


@cache
def second_model() -> nn.Module:
    return small_model("qwen3", seed=1)


def by_loss_sum(hdp: Hdp, model: nn.Module, batch: list[dict[str, Any]], plan: Any) -> None:
    for micro in hdp.plan(batch, plan=plan):
        micro.loss_sum(model).backward()


def by_logits_and_fields(hdp: Hdp, model: nn.Module, batch: list[dict[str, Any]], plan: Any) -> None:
    for micro in hdp.plan(batch, plan=plan):
        logits = model(**micro.inputs).logits[0, : micro.num_rows]
        losses = F.cross_entropy(logits, micro.labels, reduction="none", ignore_index=-100)
        (micro.weights * micro.multiplicity * micro.reward * losses).sum().backward()


def by_scores(hdp: Hdp, model: nn.Module, batch: list[dict[str, Any]], plan: Any) -> None:
    for micro in hdp.plan(batch, plan=plan):
        words = torch.ones(micro.num_rows, 2, dtype=torch.int64)
        temperature = torch.full((micro.num_rows,), 0.7)
        found: Any = micro.logprobs(
            model, temperature=temperature, entropy=True, top=2, words=words, mean_logits=True, hidden=True
        )
        values = found.hidden @ torch.linspace(0, 1, found.hidden.shape[1], dtype=torch.float64)
        parts = (found.logprobs, found.entropy, found.top_logprobs, found.word_logprobs, found.mean_logits, values)
        sum((part.sum() for part in parts), torch.zeros(())).backward()


def gspo(hdp: Hdp, model: nn.Module, batch: list[dict[str, Any]], plan: Any) -> None:
    for micro in hdp.plan(batch, plan=plan):
        whole = micro.documents(micro.logprobs(model))
        whole.sum([values.mean().exp() for values in whole]).backward()


def of_pairs_of_values(hdp: Hdp, model: nn.Module, batch: list[dict[str, Any]], plan: Any) -> None:
    for micro in hdp.plan(batch, plan=plan):
        whole = micro.documents(torch.stack([micro.logprobs(model), micro.reward], dim=1))
        whole.sum([values.prod(dim=1).sum() for values in whole]).backward()


def with_a_second_model(hdp: Hdp, model: nn.Module, batch: list[dict[str, Any]], plan: Any) -> None:
    reference = copy.deepcopy(second_model())
    hdp.attach(reference)
    for micro in hdp.plan(batch, plan=plan):
        kl = micro.logprobs(model) - micro.logprobs(reference)
        with torch.no_grad():
            rows = -(-micro.plan.num_tokens // hdp.mesh.tp.size)  # of which some pad
            assert reference(**micro.inputs_for(reference)).logits.shape[1] == max(1, rows)
        kl.square().sum().backward()


def by_two_loops(hdp: Hdp, model: nn.Module, batch: list[dict[str, Any]], plan: Any) -> None:
    with torch.no_grad():
        for micro in hdp.plan(batch, plan=plan):
            hdp.collect(micro, micro.logprobs(model))
    given = [document | {"found": found.exp()} for document, found in zip(batch, hdp.collected(), strict=True)]
    for micro in hdp.plan(given, plan=plan):
        (micro.found * micro.logprobs(model)).sum().backward()


def coupled(passes: int) -> Loop:
    def loop(hdp: Hdp, model: nn.Module, batch: list[dict[str, Any]], plan: Any) -> None:
        def loss(documents: list[Any], values: list[Tensor]) -> Tensor:
            return torch.stack([own.sum() for own in values]).logsumexp(0)

        hdp.backward(batch, loss, passes=passes)

    return loop


def of_other_trainers(hdp: Hdp, model: nn.Module, batch: list[dict[str, Any]], plan: Any) -> None:
    whole = WholeBatch(hdp, word_columns(model), num_trained=2)
    own = batch if hdp.group.rank == hdp.group.size - 1 else []
    labels = [torch.cat([document["tokens"][1:], torch.tensor([-100])]) for document in own]
    fields = {"tokens": [document["tokens"] for document in own], "labels": labels}
    if not own:
        fields = {"tokens": [torch.zeros(0, dtype=torch.int64)][:0], "labels": []}
    values, _ = whole.run(fields)
    (values[:, 0].exp().sum() + values[:, 1].sum()).backward()
    whole.finish()


LOOPS = {
    "loss_sum": by_loss_sum,
    "fields": by_logits_and_fields,
    "scores": by_scores,
    "documents": gspo,
    "documents of pairs": of_pairs_of_values,
    "second model": with_a_second_model,
    "collect": by_two_loops,
    "one pass": coupled(1),
    "two passes": coupled(2),
    "other trainers": of_other_trainers,
}


def gradients(num_ranks: int, loop: Loop, batch: list[dict[str, Any]], plan: Any = None, **options: Any) -> Any:
    second_model()  # not by several threads at once

    def work(group: Any, model: nn.Module) -> dict[str, Tensor]:
        hdp = Hdp(model, group, capacity_tokens=40, **options)
        hdp.optimizer(torch.optim.SGD, lr=0.0)
        loop(hdp, model, batch, plan)
        found = hdp.gradients()
        hdp.step()
        return found

    return on_ranks(num_ranks, small_model("qwen3"), work)[0]


def assert_close(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10 * max(1.0, float(value.abs().max())))


@pytest.mark.parametrize("name", one_in(2, [name for name in LOOPS if name != "other trainers"]))
def test_rings_in_which_a_rank_has_no_rows(name: str) -> None:
    """A document of two tokens on three ranks. The losses that plan for themselves do not take a plan."""
    batch = documents([2], reward=0.5)
    plan = Plan.build(
        lengths=[2], capacity_tokens=[40] * 3, groups=[GroupSpec(sequences=[0], ranks=[2, 0, 1])],
        schedule=[[[0]], [[0]], [[0]]], planner="by hand",
    )  # fmt: skip
    wanted = gradients(1, LOOPS[name], batch)
    assert_close(gradients(3, LOOPS[name], batch, plan), wanted)


@pytest.mark.parametrize(("name", "domain"), pairs(list(LOOPS), [2, 4]))
def test_rounds_in_which_a_rank_has_no_documents(name: str, domain: int) -> None:
    batch = documents([20], reward=0.5)
    wanted = gradients(1, LOOPS[name], batch)
    assert_close(gradients(domain, LOOPS[name], batch, shard="parameters", domain=domain), wanted)


@pytest.mark.parametrize("name", one_in(4, [name for name in LOOPS if name != "other trainers"]))
@pytest.mark.parametrize("shard", one_of(["optimizer", "parameters"], "parameters"))
def test_tensor_parallel_ranks_without_rows(name: str, shard: str) -> None:
    """Two documents of one and two tokens on two HDP ranks, each of which is two tensor-parallel ones."""
    batch, options = documents([2, 1], reward=0.5), {"domain": 2} if shard == "parameters" else {}
    plan = Plan.build(
        lengths=[2, 1], capacity_tokens=[40] * 2, schedule=[[[0], [1]], [[0]]], planner="by hand",
        groups=[GroupSpec(sequences=[0], ranks=[1, 0]), GroupSpec(sequences=[1], ranks=[0])],
    )  # fmt: skip
    given = None if shard == "parameters" else plan
    wanted = gradients(1, LOOPS[name], batch)
    assert_close(gradients(4, LOOPS[name], batch, given, tp=2, shard=shard, **options), wanted)
