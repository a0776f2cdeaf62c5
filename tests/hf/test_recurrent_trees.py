"""Prefixes that documents share, computed once by models with recurrent layers: equal to documents one by one."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bytescale
from bytescale.parity import small_model
from bytescale.parity.compare import Document, WideCasts, difference, plain_step
from bytescale.parity.compare import StepNumbers as Numbers
from bytescale.planner.prefixes import Prefixes
from tests.attention.test_trees import random_tree
from tests.helpers.effort import examples, one_of

from .support import documents, on_ranks
from .test_prefixes import numbers_of

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


def step_of(model: nn.Module, batch: list[Document], num_ranks: int, capacity: int, **options: Any) -> list[Any]:
    """By rank: loss, gradients and log-probabilities with shared prefixes, and whether there are trees."""

    def work(group: Any, model: nn.Module) -> Any:
        hdp = bytescale.HDP(model, group, capacity_tokens=capacity, **options)
        hdp.adamw(lr=0.0)
        planned = hdp.plan(batch, share_prefixes=True)
        with WideCasts():
            return *numbers_of(hdp, planned), planned.forest is not None

    with patch.object(Prefixes, "worthwhile", lambda self, cost: self.common):
        return on_ranks(num_ranks, model, work)


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
@given(num_ranks=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_random_trees_are_the_documents_one_by_one(name: str, num_ranks: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    lists = [
        *random_tree(random, most=20),
        *random_tree(random, most=4),
        random.integers(0, 60, 100 if num_ranks == 1 else 150).tolist(),
    ]
    batch, model = batch_of([*lists, lists[0], [*lists[0], 3]], seed), small_model(name)
    wanted = wanted_of(model, batch)
    assert worst_of(step_of(model, batch, num_ranks, 100), wanted, batch) <= 1e-10
