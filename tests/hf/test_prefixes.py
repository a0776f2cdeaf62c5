"""Shared prefixes computed once: loss, gradients and log-probabilities of documents one by one on one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import bytescale
from bytescale.common.errors import ConfigError, DataError, PlanError
from bytescale.hf.batch.planning import make_planner
from bytescale.hf.batch.prefixes import part_of_trees, shared_plan
from bytescale.hf.loop.batch_plan import BatchToPlan
from bytescale.hf.model.selectors import LowestFirst
from bytescale.parity.compare import random_plan
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.planner.prefixes import with_equal_work
from tests.helpers.effort import one_of

from .support import documents, on_ranks, small_model

EXACT = 1e-10
OTHER_WAYS: list[dict[str, Any]] = [
    {"checkpointing": "full"},
    {"checkpointing": "attention"},
    {"host_gib": 0.01},
    {"shard": "parameters", "domain": 2},
    {"equal_counts": True},
]
"""To hold activations and parameters, as arguments of ``HDP``."""


class _WideParts(TorchFunctionMode):
    """Norms and softmaxes that transformers' models compute in fp32 are computed in fp64, for models in fp64.

    A shared row goes backward once, with the sum of its documents' gradients. In fp32 that differs by rounding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in args):
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def tree(seed: int = 0, prompt: int = 30, answers: tuple[int, ...] = (12, 1, 25, 7)) -> list[dict[str, Any]]:
    """Samples of two prompts that begin alike, with turns, a document that is a prefix, equal ones and a lone one."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> Tensor:
        return torch.randint(2, 67, (count,), generator=generator)

    system = words(20)
    prompts = [torch.cat([system, words(prompt)]) for _ in range(2)]
    tokens = [torch.cat([prompts[number % 2], words(length)]) for number, length in enumerate([*answers, *answers])]
    tokens += [torch.cat([tokens[2], words(9)]), torch.cat([tokens[2], words(4)]), prompts[0], tokens[5], words(33)]
    batch = documents([len(own) for own in tokens], seed)
    for document, own in zip(batch, tokens, strict=True):
        document["tokens"] = own
        document["weights"] = torch.rand(len(own), generator=generator, dtype=torch.float64) + 0.1
    return batch


@contextmanager
def wide_parts() -> Iterator[None]:
    with _WideParts():
        yield


def one_by_one(model: nn.Module, batch: list[dict[str, Any]]) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """Loss, gradients and log-probabilities of every document in a pass of its own."""
    model, total, logprobs = copy.deepcopy(model), 0.0, []
    with wide_parts(), LowestFirst():
        for document in batch:
            logits = model(input_ids=document["tokens"][None]).logits[0]
            losses = F.cross_entropy(logits[:-1], document["tokens"][1:], reduction="none")
            loss = (document["weights"][:-1] * losses).sum()
            loss.backward()
            total += float(loss.detach())
            logprobs.append(F.pad(-losses.detach(), (0, 1)))
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, logprobs


def assert_equal(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    largest = max(float(value.abs().max()) for value in wanted.values())
    for name, value in wanted.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=EXACT * max(1.0, largest), msg=name)


WINDOW = {"sliding_window": 200}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}), ("gemma2", WINDOW), ("gpt_oss", WINDOW), ("mixtral", {}), ("deepseek_v3", {}),
    ("deepseek_v32", {"index_topk": 9}), ("minimax_m3_vl_text", {}),
]  # fmt: skip


def numbers_of(hdp: bytescale.HDP, planned: Any) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """This rank's share of the loss, all gradients, and the log-probabilities of all documents."""
    share = 0.0
    for micro in planned:
        with torch.no_grad():
            planned.collect(micro, micro.logprobs(hdp.model))
        loss = micro.loss_sum(hdp.model)
        loss.backward()
        share += float(loss.detach())
    return share, hdp.gradients(), planned.collected()


@pytest.mark.parametrize("num_ranks", one_of([1, 2, 3, 4], quick=2))
@pytest.mark.parametrize(("family", "changes"), one_of(FAMILIES, quick=FAMILIES[1]))
def test_trees_are_the_documents_one_by_one(family: str, changes: dict[str, Any], num_ranks: int) -> None:
    """Under our plan, and under random ones: any ranks share any trees in grids of any shape."""
    batch, model = tree(), small_model(family, max_position_embeddings=256, **changes)
    wanted, gradients, logprobs = one_by_one(model, batch)

    def work(group: Any, model: nn.Module) -> list[Any]:
        hdp = bytescale.HDP(model, group, capacity_tokens=4096 if num_ranks == 1 else 512)
        hdp.adamw(lr=0.0)
        given = BatchToPlan.of(hdp, batch, shift_labels=False, per_document=())
        alone = make_planner(num_ranks=1, capacity_tokens=4096)
        (whole, trees), found = shared_plan(given.documents, alone), []
        assert trees is not None
        plans = [given.plan()]
        plans += [(random_plan(whole.lengths, num_ranks, seed, weighted=seed == 1), trees) for seed in range(2)]
        plans += [(with_equal_work(random_plan(whole.lengths, num_ranks, 2), trees, hdp.cost), trees)]
        with wide_parts():
            for plan, forest in plans:
                found.append(numbers_of(hdp, given.part(plan, forest)))
                hdp.step()
        return [sum(len(d["tokens"]) for d in batch) / whole.num_tokens, found]

    results = on_ranks(num_ranks, model, work)
    assert results[0][0] > 1.8  # so many tokens for each row
    for number in range(4):
        assert sum(found[number][0] for _, found in results) == pytest.approx(wanted, rel=EXACT)
        for _, found in results:
            assert_equal(found[number][1], gradients)
            for ours, own in zip(found[number][2], logprobs, strict=True):
                torch.testing.assert_close(ours, own, rtol=0, atol=EXACT)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return small_model("llama", max_position_embeddings=256)


def whole_documents(model: nn.Module, batch: list[dict[str, Any]], loss: Any) -> tuple[float, dict[str, Tensor]]:
    """``loss`` of the log-probabilities of all documents, and its gradients, in one process."""
    model = copy.deepcopy(model)
    with wide_parts():
        values = [
            F.pad(
                -F.cross_entropy(model(input_ids=d["tokens"][None]).logits[0, :-1], d["tokens"][1:], reduction="none"),
                (0, 1),
            )
            for d in batch
        ]
        total = loss(values)
        total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def reward_of(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for number, document in enumerate(batch):
        document["reward"] = 0.1 * number - 0.5
    return batch


@pytest.mark.parametrize("num_ranks", one_of([1, 2, 3], quick=2))
def test_losses_of_whole_documents_and_of_several(llama: nn.Module, num_ranks: int) -> None:
    """GSPO by ``micro.documents``, DPO by ``hdp.backward`` in one pass and in two: rewards keep no rows apart."""
    batch, labels = reward_of(tree()), [number // 2 for number in range(13)]

    def gspo(values: Tensor, document: dict[str, Any]) -> Tensor:
        return -(values[:-1] + 3).mean().exp() * document["reward"]

    def group(own: list[Any], values: list[Tensor]) -> Tensor:
        return -F.logsigmoid(sum(d["reward"] * v[:-1].sum() for d, v in zip(own, values, strict=True)))

    def of_groups(values: list[Tensor]) -> Tensor:
        return sum(group([batch[n] for n in own], [values[n] for n in own]) for own in places)  # type: ignore[return-value]

    places = [[n for n in range(13) if labels[n] == label] for label in range(7)]
    alone = whole_documents(llama, batch, lambda values: sum(map(gspo, values, batch)))
    coupled = whole_documents(llama, batch, of_groups)

    def work(group_of_ranks: Any, model: nn.Module) -> list[Any]:
        hdp = bytescale.HDP(model, group_of_ranks, capacity_tokens=600)
        hdp.adamw(lr=0.0)
        given = BatchToPlan.of(hdp, batch, shift_labels=False, per_document=["reward"])
        plan, trees = given.plan()
        assert trees is not None
        shares, found = [], []
        with wide_parts():
            # Under our plan, and under one in which ranks share trees.
            randoms = (random_plan(plan.lengths, num_ranks, seed) for seed in range(20))
            for own in (plan, next(other for other in randoms if other.group_sizes.max() == num_ranks)):
                shares.append(0.0)
                for micro in given.part(own, trees):
                    whole = micro.documents(micro.logprobs(model))
                    loss = whole.sum([gspo(v, batch[n]) for n, v in zip(whole.numbers, whole, strict=True)])
                    loss.backward()
                    shares[-1] += float(loss.detach())
                found.append(hdp.gradients())
                hdp.step()
            for passes in (1, 2, None):
                result = hdp.backward(batch, group, together=labels, passes=passes, share_prefixes=True)
                assert result.loss == pytest.approx(coupled[0], rel=EXACT)
                found.append(hdp.gradients())
                hdp.step()
        return [shares, *found]

    results = on_ranks(num_ranks, llama, work)
    for shares in zip(*(result[0] for result in results), strict=True):
        assert sum(shares) == pytest.approx(alone[0], rel=EXACT)
    for _, own, shared, *others in results:
        assert_equal(own, alone[1])
        assert_equal(shared, alone[1])
        for gradients in others:
            assert_equal(gradients, coupled[1])


def test_a_loss_of_rows_counts_them_by_their_multiplicity(llama: nn.Module) -> None:
    """Old log-probabilities that differ keep rows apart; a loss without weights multiplies by ``multiplicity``."""
    batch, old = tree(), torch.linspace(-5, -1, 67, dtype=torch.float64)
    for number, document in enumerate(batch):
        document["old"] = old[document["tokens"]] + (0.1 * number if number in (1, 3) else 0.0)

    def ratios(values: Tensor, documents_old: Tensor) -> Tensor:
        return (values - documents_old).exp().clamp(0.5, 1.5)

    def of_all(values: list[Tensor]) -> Tensor:
        return sum(ratios(v, d["old"]).sum() for v, d in zip(values, batch, strict=True))  # type: ignore[return-value]

    wanted, gradients = whole_documents(llama, batch, of_all)
    model = copy.deepcopy(llama)
    hdp = bytescale.HDP(model, capacity_tokens=4096)
    hdp.adamw(lr=0.0)
    planned, total = hdp.plan(batch, share_prefixes=True), 0.0
    assert planned.forest is not None
    assert not planned.forest.shared[[at for at, n in enumerate(planned.forest.documents) if n in (1, 3)]].any()
    with wide_parts():
        for micro in planned:
            assert int(micro.multiplicity.sum()) == sum(len(d["tokens"]) for d in batch)
            loss = (micro.multiplicity * ratios(micro.logprobs(model), micro.old)).sum()
            loss.backward()
            total += float(loss.detach())
    assert total == pytest.approx(wanted, rel=EXACT)
    assert_equal(hdp.gradients(), gradients)


def test_without_common_prefixes_nothing_changes(llama: nn.Module) -> None:
    """To the last bit, and the micro-batches have their documents."""
    batch, found = documents([37, 2, 8, 21, 60, 12]), []
    for share in (False, True):
        model = copy.deepcopy(llama)
        hdp = bytescale.HDP(model, capacity_tokens=80)
        hdp.adamw(lr=0.0)
        planned = hdp.plan(batch, share_prefixes=share)
        for micro in planned:
            assert micro.segments == micro.plan.runs
            assert micro.multiplicity.tolist() == [1] * micro.num_rows
            micro.loss_sum(model).backward()
        found.append((planned.rank_plan.digest, hdp.gradients()))
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name])


def test_what_trees_cannot_do_is_refused(llama: nn.Module) -> None:
    batch, model = reward_of(tree()), copy.deepcopy(llama)
    hdp = bytescale.HDP(model, capacity_tokens=4096)
    (micro,) = hdp.plan(batch, share_prefixes=True, per_document=["reward"])
    with pytest.raises(PlanError, match=r"rows that several documents share.*micro\.documents"):
        _ = micro.segments
    with pytest.raises(AttributeError, match="no field 'reward'"):
        _ = micro.reward
    with pytest.raises(ConfigError, match="share_prefixes = True and a plan"):
        hdp.plan(batch, share_prefixes=True, plan=hdp.planner([len(d["tokens"]) for d in batch]))
    for name in ("rewards", "labels"):
        with pytest.raises(DataError, match=f"per_document names '{name}'"):
            hdp.plan(batch, share_prefixes=True, per_document=[name])


@pytest.mark.parametrize("num_ranks", one_of([1, 2, 3], quick=2))
@pytest.mark.parametrize("family", one_of(["gemma2", "gpt_oss"], quick="gpt_oss"))
def test_windows_that_are_shorter_than_the_documents(family: str, num_ranks: int) -> None:
    """The planner's plan; long trees on one rank, beside what ranks share; and all trees and documents shared."""
    short = tree(seed=1, prompt=2, answers=(3, 1, 2))
    batch = tree() + short + tree(seed=2) + documents([500], seed=3)
    model = small_model(family, sliding_window=40, max_position_embeddings=1024)
    wanted, gradients, logprobs = one_by_one(model, batch)

    def work(group: Any, model: nn.Module) -> list[Any]:
        hdp = bytescale.HDP(model, group, capacity_tokens=1500 // num_ranks)
        hdp.adamw(lr=0.0)
        given = BatchToPlan.of(hdp, batch, shift_labels=False, per_document=())
        alone = make_planner(num_ranks=1, capacity_tokens=4096)
        whole, trees = shared_plan(given.documents, alone)
        assert trees is not None
        longest, alone = np.maximum.reduceat(trees.lengths, trees.offsets[:-1]), np.diff(trees.offsets) == 1
        short, lone = np.flatnonzero((longest <= 40) & ~alone), np.flatnonzero(alone)
        long = np.setdiff1d(np.arange(whole.num_sequences), [*short, *lone])
        assert len(short)
        assert len(long)
        by_hand = Plan.build(
            lengths=whole.lengths,
            capacity_tokens=[4096] * num_ranks,
            groups=[
                GroupSpec(sequences=short.tolist(), ranks=range(num_ranks)),
                GroupSpec(sequences=lone.tolist(), ranks=range(num_ranks)),
                *(GroupSpec(sequences=[at], ranks=[0]) for at in long),
            ],
            schedule=[[[0, 2], [1, *range(3, 2 + len(long))]], *[[[0], [1]]] * (num_ranks - 1)],
        )
        together = Plan.build(
            lengths=whole.lengths, capacity_tokens=[4096] * num_ranks, schedule=[[[0]]] * num_ranks,
            groups=[GroupSpec(sequences=range(whole.num_sequences), ranks=range(num_ranks))],
        )  # fmt: skip
        found = []
        with wide_parts():
            for plan, forest in (given.plan(), (by_hand, trees), (together, trees)):
                found.append(numbers_of(hdp, given.part(plan, forest)))
                hdp.step()
        return found

    results = on_ranks(num_ranks, model, work)
    for number in range(3):
        assert sum(found[number][0] for found in results) == pytest.approx(wanted, rel=EXACT)
        assert_equal(results[0][number][1], gradients)
        for ours, own in zip(results[0][number][2], logprobs, strict=True):
            torch.testing.assert_close(ours, own, rtol=0, atol=EXACT)


def test_rows_of_other_documents_are_found(llama: nn.Module) -> None:
    """A planted fault: a tree that says that documents share one row more than they have in common."""
    hdp = bytescale.HDP(copy.deepcopy(llama), capacity_tokens=4096)
    given = BatchToPlan.of(hdp, tree(), shift_labels=False, per_document=())
    plan, forest = given.plan()
    assert forest is not None
    rank_plan = RankPlan.of(plan, 0)
    part_of_trees(rank_plan, given.documents, forest, (), torch.float64)
    wrong = replace(forest, shared=forest.shared + (forest.shared > 0) * (forest.shared < forest.lengths))
    with pytest.raises(PlanError, match=r"Rows of the field '.*' under a plan of trees are not those"):
        part_of_trees(rank_plan, given.documents, wrong, (), torch.float64)


@pytest.mark.parametrize("options", one_of(OTHER_WAYS, quick={"checkpointing": "attention"}))
def test_trees_with_other_ways_to_hold_activations_and_parameters(options: dict[str, Any]) -> None:
    """Gradients are those of the same trees without them, and the loss is that of documents one by one."""
    batch, model = tree(), small_model("llama", max_position_embeddings=256, num_hidden_layers=5)
    computes_again = "checkpointing" in options  # in backward, which does not know that fp32 is to be fp64

    def work(group: Any, model: nn.Module, options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
        hdp = bytescale.HDP(model, group, capacity_tokens=300, **options)
        hdp.adamw(lr=0.0)
        planned, share = hdp.plan(batch, share_prefixes=True), 0.0
        assert planned.forest is not None
        with nullcontext() if computes_again else wide_parts():
            for micro in planned:
                loss = micro.loss_sum(model)
                loss.backward()
                share += float(loss.detach())
        return share, hdp.gradients()

    plain, ours = (on_ranks(2, model, lambda *given, own=own: work(*given, own)) for own in ({}, options))
    loss = sum(share for share, _ in ours)
    assert loss == pytest.approx(sum(share for share, _ in plain), rel=EXACT)
    assert loss == pytest.approx(one_by_one(model, batch)[0], rel=1e-6)
    assert_equal(ours[0][1], plain[0][1])
