"""``last=True``: gradients are reduced while ranks compute, and loops that would break that are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bytescale
from bytescale.common.errors import ConfigError
from bytescale.parity import small_model
from bytescale.plan.last_message import last_backward_is_silent
from tests.helpers.effort import pairs

from .support import documents, on_ranks, parameters_of


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bytescale.runtime.optimizer.take_over.BUCKET_BYTES", 1)


LENGTHS = [[50, 8, 3, 20, 11, 5], [9], [70]]


def begun(hdp: bytescale.HDP) -> bool:
    """Whether this rank has started a reduction."""
    return hdp.sharded().zeros[0].collectives.reducing_from < float("inf")


@pytest.mark.parametrize(
    ("model_and_checkpointing", "lengths"),
    [
        *pairs([("gpt2", "none"), ("llama", "full"), ("llama", "hugging face")], LENGTHS),
        *(pytest.param(("qwen3", "none"), lengths, marks=pytest.mark.exhaustive) for lengths in LENGTHS),
    ],
)
def test_weights_are_those_without_overlap_and_reductions_begin_in_backward(
    model_and_checkpointing: tuple[str, str], lengths: list[int]
) -> None:
    """Short documents alone, one for three ranks, and one that all share. Every bit is the same."""
    name, checkpointing = model_and_checkpointing

    def train(group: Any, model: nn.Module, last: bool) -> tuple[dict[str, Tensor], list[bool]]:
        if checkpointing == "hugging face":
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        own = "full" if checkpointing == "full" else "none"
        hdp = bytescale.HDP(model, group, capacity_tokens=30, checkpointing=own)
        hdp.adamw(lr=1e-2)
        amid = []
        for seed in range(2):
            planned = hdp.plan(documents(lengths, seed), last=last)
            for micro in planned:
                micro.loss_sum(model).backward()
                silent = last_backward_is_silent(planned.rank_plan) and micro.index == len(planned) - 1
                assert begun(hdp) == (last and silent and group.size() > 1)
                amid.append(begun(hdp))
            assert begun(hdp) == last
            hdp.step()
        return parameters_of(model), amid

    model = small_model(name)
    plain, overlapped = (
        on_ranks(3, model, lambda group, own, last=last: train(group, own, last)) for last in (False, True)
    )
    assert any(any(amid) for _, amid in overlapped) == (lengths != [70])
    for (weights, _), (expected, _) in zip(overlapped, plain, strict=True):
        assert all(torch.equal(weights[key], value) for key, value in expected.items())


def with_optimizer(model: nn.Module, group: Any) -> bytescale.HDP:
    hdp = bytescale.HDP(model, group, capacity_tokens=30)
    hdp.adamw(lr=1e-2)
    return hdp


def test_nothing_comes_between_the_last_batch_and_its_step() -> None:
    def work(group: Any, model: nn.Module) -> None:
        hdp = with_optimizer(model, group)
        for micro in hdp.plan(documents([20, 19]), last=True):
            micro.loss_sum(model).backward()
        for action in (lambda: hdp.plan(documents([5])), hdp.gradients, hdp.zero_grad, model.zero_grad):
            with pytest.raises(ConfigError, match=r"last=True"):
                action()
        hdp.step()
        for micro in hdp.plan(documents([5])):
            micro.loss_sum(model).backward()
        hdp.step()

    on_ranks(2, small_model("qwen3"), work)


def backward_twice(model: nn.Module, hdp: bytescale.HDP) -> None:
    for micro in hdp.plan(documents([20, 20]), last=True):
        micro.logprobs(model).sum().backward()
        micro.logprobs(model).sum().backward()


def backward_after_the_loop(model: nn.Module, hdp: bytescale.HDP) -> None:
    losses = [micro.loss_sum(model) for micro in hdp.plan(documents([20, 20]), last=True)]
    sum(losses).backward()  # type: ignore[union-attr]


def backward_of_the_first_later(model: nn.Module, hdp: bytescale.HDP) -> None:
    losses = []
    for micro in hdp.plan(documents([20, 19, 20, 19]), last=True):
        losses.append(micro.loss_sum(model))
    sum(losses).backward()  # type: ignore[union-attr]


def only_looked_at(model: nn.Module, hdp: bytescale.HDP) -> None:
    with torch.no_grad():
        for micro in hdp.plan(documents([20, 20]), last=True):
            micro.logprobs(model)


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (backward_twice, "got a gradient after its reduction had begun"),
        (backward_after_the_loop, "its backward has not run"),
        (backward_of_the_first_later, "micro-batch 0 of rank .: its backward has not run"),
        (only_looked_at, "ended without a backward"),
    ],
)
def test_loops_that_break_the_promise(loop: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        on_ranks(2, small_model("qwen3"), lambda group, model: loop(model, with_optimizer(model, group)))


def test_a_model_whose_gradients_cannot_be_reduced_layer_by_layer() -> None:
    model = small_model("qwen3")
    model.register_module("head_of_its_own", nn.Linear(4, 1, dtype=torch.float32))  # the model has fp64
    hdp = bytescale.HDP(model, capacity_tokens=30)
    hdp.adamw(lr=1e-2)
    with pytest.raises(ConfigError, match="cannot be reduced layer by layer"):
        hdp.plan(documents([5]), last=True)
