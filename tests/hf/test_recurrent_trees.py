"""Prefixes that documents share, computed once by models with recurrent layers: equal to documents one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bytescale
from bytescale.common.arrays import IntArray
from bytescale.hf.batch.planning import make_planner
from bytescale.hf.batch.prefixes import shared_plan
from bytescale.hf.loop.batch_plan import BatchToPlan
from bytescale.parity import small_model
from bytescale.parity.compare import Document, WideCasts, difference, plain_step, random_plan
from bytescale.parity.compare import StepNumbers as Numbers
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from bytescale.plan.trees import Forest
from bytescale.planner.prefixes import Prefixes
from tests.attention.test_trees import random_tree
from tests.helpers.effort import examples, one_of

from .support import documents, on_ranks
from .test_prefixes import OTHER_WAYS, numbers_of, tree

MODELS = ["qwen3_next", "kimi_linear", "jamba", "falcon_h1", "nemotron_h", "minimax", "lfm2", "falcon_mamba"]
"""Delta rules, Mamba 1 and 2, lightning, convolutions alone; beside attention, beside experts, and alone."""


def batch_of(lists: list[list[int]], seed: int = 0) -> list[Document]:
    batch = documents([len(own) for own in lists], seed)
    for document, own in zip(batch, lists, strict=True):
        document["tokens"] = torch.tensor(own) + 2
    return batch


def wanted_of(model: nn.Module, batch: list[Document]) -> Numbers:
    labelled = [{**document, "labels": torch.cat([document["tokens"][1:], torch.tensor([-100])])} for document in batch]
    return plain_step(copy.deepcopy(model), labelled)


def steps_of(
    model: nn.Module, batch: list[Document], num_ranks: int, capacity: int, seeds: Sequence[int] = (), **options: Any
) -> list[list[Any]]:
    """By plan and rank: loss, gradients and log-probabilities. Our plan comes first, and then random ones.

    In the latter, any ranks share any trees in grids of any shape. All that documents have in common is shared.
    """

    def work(group: Any, model: nn.Module) -> list[Any]:
        hdp = bytescale.HDP(model, group, capacity_tokens=capacity, **options)
        hdp.adamw(lr=0.0)
        given, found = BatchToPlan.of(hdp, batch, shift_labels=False, per_document=()), []
        whole, trees = shared_plan(given.documents, make_planner(num_ranks=1, capacity_tokens=10**6))
        assert trees is not None
        plans = [given.plan()]
        plans += [(random_plan(whole.lengths, num_ranks, seed, weighted=seed % 2 == 1), trees) for seed in seeds]
        with WideCasts():
            for plan, forest in plans:
                found.append(numbers_of(hdp, given.part(plan, forest)))
                hdp.step()
        return found

    with patch.object(Prefixes, "worthwhile", lambda self, cost: self.common):
        return list(zip(*on_ranks(num_ranks, model, work), strict=True))


def worst_of(results: list[Any], wanted: Numbers, batch: list[Document]) -> float:
    total = float(sum(document["weights"].sum() for document in batch))
    found = Numbers(
        loss=sum(loss for loss, *_ in results) / total,
        gradients={name: gradient / total for name, gradient in results[0][1].items()},
        logprobs=results[0][2],
    )
    return difference(wanted, found).worst


@pytest.mark.parametrize("name", one_of(MODELS, quick="qwen3_next"))
@examples(1, 8)
@given(num_ranks=st.integers(2, 4), seed=st.integers(0, 10**6))
def test_random_trees_are_the_documents_one_by_one(name: str, num_ranks: int, seed: int) -> None:
    """Under our plan and under random ones, beside a long document and others of their own."""
    random = np.random.default_rng(seed)
    lists = [[1, 1, 2, 1, 1], [1, 1, 2, 2], *random_tree(random, most=20), random.integers(0, 60, 150).tolist()]
    batch, model = batch_of([*lists, lists[0], [*lists[2], 3]], seed), small_model(name)
    wanted = wanted_of(model, batch)
    for results in steps_of(model, batch, num_ranks, 100, [seed, seed + 1]):
        assert worst_of(results, wanted, batch) <= 1e-10


@pytest.mark.parametrize("options", one_of(OTHER_WAYS, quick={"checkpointing": "attention"}))
def test_trees_with_other_ways_to_hold_activations_and_parameters(options: dict[str, Any]) -> None:
    layers = {"num_hidden_layers": 6, "layer_types": ["linear_attention", "full_attention"] * 3}
    batch = tree(prompt=8, answers=(5, 1, 4))
    model = small_model("qwen3_next", **layers) if "host_gib" in options else small_model("qwen3_next")
    aligned = {"domain": 2} if "shard" in options or "equal_counts" in options else {}
    wanted = wanted_of(model, batch)
    for results in steps_of(model, batch, 2, 300, [1] if not aligned else [], **options):
        assert worst_of(results, wanted, batch) <= 1e-10


def shared_by_two(count: int) -> Plan:
    return Plan.build(
        lengths=[count],
        capacity_tokens=[count] * 2,
        schedule=[[[0]]] * 2,
        groups=[GroupSpec(sequences=[0], ranks=[0, 1])],
    )


@pytest.mark.parametrize("num_ranks", one_of([1, 2], quick=2))
@pytest.mark.parametrize("name", one_of(["qwen3_next", "jamba", "lfm2"], quick="qwen3_next"))
def test_a_branch_that_begins_behind_its_sibling_would_show(name: str, num_ranks: int) -> None:
    """A planted fault: the state, or the last rows, before a branch are those before in depth-first order."""
    first = list(range(20))
    batch, model = batch_of([[*first, *range(30, 37)], [*first, *range(40, 49)]]), small_model(name)
    wanted, right = wanted_of(model, batch), Forest.runs

    def wrong(self: Forest) -> tuple[IntArray, IntArray]:
        starts, parents = right(self)
        return starts, np.arange(len(parents)) - 1

    def work(group: Any, model: nn.Module) -> list[Any]:
        hdp = bytescale.HDP(model, group, capacity_tokens=1000)
        hdp.adamw(lr=0.0)
        given = BatchToPlan.of(hdp, batch, shift_labels=False, per_document=())
        plan, forest = shared_plan(given.documents, make_planner(num_ranks=1, capacity_tokens=1000))
        assert forest is not None
        with WideCasts():
            return numbers_of(hdp, given.part(plan if num_ranks == 1 else shared_by_two(int(plan.lengths[0])), forest))

    assert worst_of(on_ranks(num_ranks, model, work), wanted, batch) <= 1e-10
    with patch.object(Forest, "runs", wrong):
        assert worst_of(on_ranks(num_ranks, model, work), wanted, batch) > 1e-5
