"""Losses of whole documents, and losses that couple documents: those of one process, whatever the plan."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import bytescale
from bytescale.common.errors import DataError, NonFiniteError, PlanError
from bytescale.hf.loop.micro_batch import Micro
from bytescale.parity.compare import WideCasts, random_plan
from tests.helpers.effort import REST, one_of, pairs

from .support import documents, on_ranks, small_model

LENGTHS = [37, 2, 8, 21, 60, 12]
PAIRS = [0, 0, 1, 1, 2, 2]


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return small_model("llama")


def rollouts(lengths: list[int] = LENGTHS, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed + 1)
    batch = documents(lengths, seed)
    for number, document in enumerate(batch):
        length = len(document["tokens"])
        document["old"] = -4.2 + torch.randn(length, generator=generator, dtype=torch.float64)
        document["advantage"] = float(number % 3) - 0.8
        document["number"] = number
    return batch


def gspo(values: Tensor, document: dict[str, Any]) -> Tensor:
    """The ratio of a sequence is the exponential of its mean log-ratio."""
    ratio = (values[:-1] - document["old"][:-1]).mean().exp()
    return -torch.minimum(ratio * document["advantage"], ratio.clamp(0.8, 1.2) * document["advantage"])


def length_normalised(values: Tensor, document: dict[str, Any]) -> Tensor:
    return -(values * document["weights"]).sum() / document["weights"].sum()


def dpo(pair: list[Any], values: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    chosen, rejected = ((v - d["old"])[:-1].sum() for d, v in zip(pair, values, strict=True))
    margin = 0.1 * (chosen - rejected)
    return -F.logsigmoid(margin), {"margin": margin.detach(), "accuracy": float(margin > 0)}


def group_advantages(group: list[Any], values: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """Every document's sum is compared with the others', through a softmax over the group."""
    scores = torch.stack([v.sum() for v in values])
    return -scores.log_softmax(0)[0] + scores.var(), {"best": scores.detach().max()}


def one_process(
    model: nn.Module, batch: list[dict[str, Any]], loss: Callable[[list[Tensor]], Any]
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Loss, gradients and metrics of whole documents, each in a pass of its own."""
    model = copy.deepcopy(model)
    values = []
    for document in batch:
        logits = model(input_ids=document["tokens"][None]).logits[0, :-1]
        values.append(F.pad(-F.cross_entropy(logits, document["tokens"][1:], reduction="none"), (0, 1)))
    total, metrics = loss(values)
    total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(total), gradients, {name: float(value) for name, value in metrics.items()}


def by_labels(batch: list[dict[str, Any]], labels: list[int], loss: Callable[..., Any]) -> Callable[..., Any]:
    def of_all(values: list[Tensor]) -> Any:
        total, metrics = torch.zeros((), dtype=torch.float64), dict[str, float]()
        for label in dict.fromkeys(labels):
            own = [number for number, other in enumerate(labels) if other == label]
            part, told = loss([batch[n] for n in own], [values[n] for n in own])
            total = total + part
            for name, value in told.items():
                metrics[name] = metrics.get(name, 0.0) + float(value)
        return total, metrics

    return of_all


def assert_gradients(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    largest = max(float(value.abs().max()) for value in wanted.values())
    for name, value in wanted.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10 * max(1.0, largest))


MESHES = [(4, 1, 1), (3, 1, 1), (4, 1, 2), (1, 1, 1), (4, 2, 1), (2, 1, 1), (8, 2, 2)]
"""Ranks, and among them tensor-parallel ranks and pipeline stages."""
SEEDS = range(4 if REST else 2)
"""Of random plans: with ranks that weigh alike, and with others."""
COUPLED = [(dpo, PAIRS), (group_advantages, [0, 1, 0, 1, 1, 0])]


@pytest.mark.parametrize(("loss", "mesh"), pairs([gspo, length_normalised], MESHES))
def test_a_loss_per_document(llama: nn.Module, loss: Any, mesh: tuple[int, int, int]) -> None:
    """Under random plans, in which any ranks share any documents in grids of any shape."""
    batch, (num_ranks, tp, pp) = rollouts(), mesh

    def of_all(values: list[Tensor]) -> Any:
        losses = [loss(v, d) for v, d in zip(values, batch, strict=True)]
        return sum(losses), {"largest": max(float(x) for x in losses)}

    wanted, gradients, _ = one_process(llama, batch, of_all)

    def work(group: Any, model: nn.Module) -> tuple[list[float], list[dict[str, Tensor]]]:
        hdp = bytescale.HDP(model, group, capacity_tokens=60, tp=tp, pp=pp)
        hdp.adamw(lr=0.0)
        found: tuple[list[float], list[dict[str, Tensor]]] = ([], [])

        def of_micro(micro: Micro) -> Tensor:
            whole = micro.documents(micro.logprobs(model))
            return whole.sum([loss(v, batch[n]) for n, v in zip(whole.numbers, whole, strict=True)])

        for seed in SEEDS:
            weighted = seed % 2 == 1 and pp == 1
            plan = random_plan(LENGTHS, num_ranks // (tp * pp), seed, weighted=weighted, num_stages=pp)
            found[0].append(hdp.plan(batch, plan=plan).forward_backward(of_micro))
            found[1].append(hdp.gradients())
            hdp.step()
        return found

    results = on_ranks(num_ranks, llama, work)
    for seed in SEEDS:
        assert results[0][0][seed] == pytest.approx(wanted, rel=1e-10)
        assert_gradients(results[-1][1][seed], gradients)


@pytest.mark.parametrize(
    ("loss_and_labels", "mesh"),
    [
        *pairs(COUPLED, MESHES[1:5:3]),
        *pairs(COUPLED, MESHES[2:7:4]),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in product(COUPLED, [*MESHES[:1], *MESHES[3:6:2]])
        ),
    ],
)
def test_a_loss_that_couples_documents(llama: nn.Module, loss_and_labels: tuple, mesh: tuple[int, int, int]) -> None:
    """In one pass and in two, loss, gradients and metrics are those of one process."""
    (loss, labels), (num_ranks, tp, pp) = loss_and_labels, mesh
    batch = rollouts()
    wanted, gradients, metrics = one_process(llama, batch, by_labels(batch, labels, loss))

    def work(group: Any, model: nn.Module) -> list[Any]:
        hdp = bytescale.HDP(model, group, capacity_tokens=160 * tp * pp // num_ranks, tp=tp, pp=pp)
        hdp.adamw(lr=0.0)
        found = []
        for passes in (1, 2, None):
            result = hdp.backward(batch, loss, together=labels, passes=passes)
            assert passes in (None, result.passes)
            found.append((result, hdp.gradients()))
            hdp.step()
        return found

    for rank_results in on_ranks(num_ranks, llama, work):
        for result, ours in rank_results:
            assert result.loss == pytest.approx(wanted, rel=1e-10)
            assert result.metrics == pytest.approx(metrics, rel=1e-10)
            assert_gradients(ours, gradients)


@pytest.mark.parametrize("name", one_of(["qwen3_5_text", "qwen3_next", "olmo_hybrid", "kimi_linear"], "qwen3_5_text"))
def test_recurrent_layers_differ_by_rounding_alone(name: str) -> None:
    """Two steps of a loss that couples documents. The recurrences of transformers compute in fp32 also in fp64 models.

    In fp64 nothing differs: what differs otherwise is rounding of sums in another order.
    """
    model, batch, labels = small_model(name), rollouts([9, 2, 5, 12]), [0, 1, 0, 1]

    def plain_steps(own: nn.Module) -> list[dict[str, Tensor]]:
        optimizer, found = torch.optim.SGD(own.parameters(), lr=0.05), []
        for _ in range(2):
            optimizer.zero_grad()
            logits = [own(input_ids=document["tokens"][None], use_cache=False).logits[0, :-1] for document in batch]
            values = [
                F.pad(-F.cross_entropy(rows, document["tokens"][1:], reduction="none"), (0, 1))
                for rows, document in zip(logits, batch, strict=True)
            ]
            by_labels(batch, labels, group_advantages)(values)[0].backward()
            found.append({name: p.grad.clone() for name, p in own.named_parameters() if p.grad is not None})
            optimizer.step()
        return found

    def work(group: Any, own: nn.Module) -> list[dict[str, Tensor]]:
        with WideCasts():
            hdp = bytescale.HDP(own, group, capacity_tokens=20)
            hdp.optimizer(torch.optim.SGD, lr=0.05)
            found = []
            for _ in range(2):
                hdp.backward(batch, group_advantages, together=labels, passes=1 if len(found) else 2)
                found.append(hdp.gradients())
                hdp.step(max_grad_norm=0.0)
            return found

    with WideCasts():
        wanted = plain_steps(copy.deepcopy(model))
    for ours, theirs in zip(on_ranks(2, model, work)[0], wanted, strict=True):
        assert_gradients(ours, theirs)


def test_documents_that_no_group_holds_take_two_passes(llama: nn.Module) -> None:
    """Without labels all documents are coupled: 140 tokens, where two ranks hold 2 x 45 at once."""
    batch = rollouts()
    wanted, gradients, _ = one_process(llama, batch, by_labels(batch, [0] * 6, group_advantages))

    def work(group: Any, model: nn.Module) -> Any:
        hdp = bytescale.HDP(model, group, capacity_tokens=45)
        hdp.adamw(lr=0.0)
        with pytest.raises(PlanError, match="keeps the documents of every label together"):
            hdp.backward(batch, group_advantages, passes=1)
        return hdp.backward(batch, group_advantages), hdp.gradients()

    for result, ours in on_ranks(2, llama, work):
        assert (result.passes, result.loss) == (2, pytest.approx(wanted, rel=1e-10))
        assert_gradients(ours, gradients)


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 3)), min_size=1, max_size=12), st.integers(1, 5))
def test_plans_keep_documents_together(items: list[tuple[int, int]], num_ranks: int) -> None:
    lengths, labels = [length for length, _ in items], [label for _, label in items]
    largest = max(sum(length for length, other in items if other == label) for label in labels)
    planner = bytescale.make_planner(num_ranks=num_ranks, capacity_tokens=-(-largest // num_ranks) + 60)
    plan = planner(np.array(lengths), labels)
    assert plan.lengths.tolist() == lengths
    group_of = {int(s): group for group in range(plan.num_groups) for s in plan.sequences_of(group)}
    for label in labels:
        assert len({group_of[n] for n, other in enumerate(labels) if other == label}) == 1


def test_parts_of_documents_are_told(llama: nn.Module) -> None:
    batch = rollouts([60, 9])

    def work(group: Any, model: nn.Module) -> None:
        hdp = bytescale.HDP(model, group, capacity_tokens=40)
        hdp.adamw(lr=0.0)
        with torch.no_grad():
            for micro in hdp.plan(batch):
                if micro.plan.shared is not None:
                    with pytest.raises(PlanError, match="parts of documents that 2 ranks share"):
                        micro.segments  # noqa: B018
                    whole = micro.documents(micro.old)
                    with pytest.raises(PlanError, match="Document 7 is not in micro-batch"):
                        whole.of(7)
                    with pytest.raises(PlanError, match="one loss for each document"):
                        whole.sum(torch.zeros(5))
                    assert torch.equal(whole.of(0), batch[0]["old"])
                with pytest.raises(PlanError, match="without the row that stands for none"):
                    micro.documents(torch.zeros(77))

    on_ranks(2, llama, work)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_loss_that_is_no_number_is_told_on_every_rank(llama: nn.Module, passes: int) -> None:
    batch = rollouts([30, 9, 5, 6])

    def loss(pair: list[Any], values: list[Tensor]) -> Tensor:
        return values[0].sum() * (math.nan if pair[0]["number"] == 2 else 1.0)

    def work(group: Any, model: nn.Module) -> None:
        hdp = bytescale.HDP(model, group, capacity_tokens=45)
        hdp.adamw(lr=1e-2)
        with pytest.raises(NonFiniteError, match=r"The loss of documents \[2, 3\] is not a number"):
            hdp.backward(batch, loss, together=[0, 0, 1, 1], passes=passes)
        assert all(float(gradient.abs().max()) == 0 for gradient in hdp.gradients().values())

    on_ranks(2, llama, work)


def test_rewards_that_are_no_numbers_are_told(llama: nn.Module) -> None:
    hdp = bytescale.HDP(copy.deepcopy(llama), capacity_tokens=40)
    for value, name in ((math.inf, "inf"), (math.nan, "nan")):
        with pytest.raises(DataError, match=f"Field 'reward' of document 1 is {name}"):
            hdp.plan([{"tokens": [3, 4], "reward": 1.0}, {"tokens": [3, 4], "reward": value}])
    with pytest.raises(PlanError, match="is a float of shape"):
        hdp.backward(rollouts([5]), lambda own, values: 1.0)
    with pytest.raises(PlanError, match="1 labels say which of 2 documents"):
        hdp.plan(rollouts([5, 6]), together=[1])
