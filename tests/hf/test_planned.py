"""``HDP.planned``: batches that a thread plans ahead of the loop are those of ``plan``, and the thread ends with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bytescale
from bytescale.common.errors import ConfigError, DataError, PlanError, RankFailure
from tests.helpers.effort import pairs

from .support import documents, on_ranks, parameters_of, small_model

LENGTHS = [37, 1, 8, 3, 60]


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return small_model("llama")


@pytest.fixture(params=[pytest.param("whole batches", marks=pytest.mark.exhaustive), "own documents"])
def looked_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank looks at: as of a small batch, or as of a large one."""
    if request.param == "own documents":
        monkeypatch.setattr("bytescale.hf.loop.batch_plan.ALL_DOCUMENTS", 0)


def planners() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("bytescale-planner")]


def require_no_planners() -> None:
    """A thread that has been joined is gone at once."""
    assert planners() == []


OPTIONS: list[dict[str, Any]] = [
    {},
    {"last": True},
    {"capacity_tokens": 70, "shift_labels": True},
    {"share_prefixes": True, "per_document": ["reward"]},
]


@pytest.mark.parametrize(("num_ranks", "options"), pairs([1, 3], OPTIONS))
def test_every_bit_is_that_of_plan_in_the_loop(
    llama: nn.Module, looked_at: None, num_ranks: int, options: dict[str, Any]
) -> None:
    """Rows of every field, weights after three updates, and what a scoring loop collects."""
    batches = [documents(LENGTHS[seed:], seed, reward=float(seed)) for seed in range(3)]
    if "shift_labels" in options:
        batches = [[{**own, "labels": own["tokens"].clone()} for own in batch] for batch in batches]

    def work(group: Any, model: nn.Module, ahead: bool) -> tuple[list[Tensor], dict[str, Tensor], list[Tensor]]:
        hdp = bytescale.HDP(model, group, capacity_tokens=120 // num_ranks)
        hdp.adamw(lr=1e-2)
        rows = []
        for planned in hdp.planned(batches, **options) if ahead else (hdp.plan(b, **options) for b in batches):
            for micro in planned:
                rows += [micro.tokens, micro.labels, micro.weights]
                micro.loss_sum(model).backward()
            hdp.step()
        scored = []
        with torch.no_grad():
            options_of_scoring = {name: value for name, value in options.items() if name != "last"}
            for planned in hdp.planned(batches[:2], **options_of_scoring):
                for micro in planned:
                    hdp.collect(micro, micro.logprobs(model))
                scored += hdp.collected()
        return rows, parameters_of(model), scored

    ahead = on_ranks(num_ranks, llama, lambda group, model: work(group, model, True))
    in_loop = on_ranks(num_ranks, llama, lambda group, model: work(group, model, False))
    for ours, theirs in zip(ahead, in_loop, strict=True):
        assert len(ours[0]) == len(theirs[0]) > 0
        assert all(map(torch.equal, ours[0], theirs[0]))
        assert all(torch.equal(ours[1][name], values) for name, values in theirs[1].items())
        assert all(map(torch.equal, ours[2], theirs[2]))
    require_no_planners()


def test_the_next_batch_is_planned_in_a_thread_and_no_more(llama: nn.Module) -> None:
    hdp, where = bytescale.HDP(llama, capacity_tokens=200), list[str]()

    class Batch(list[dict[str, Any]]):
        def __getitem__(self, number: Any) -> Any:
            where.append(threading.current_thread().name)
            return super().__getitem__(number)

    taken: list[int] = []

    def source() -> Iterator[Batch]:
        for number in range(5):
            taken.append(number)
            yield Batch(documents(LENGTHS, number))

    for number, planned in enumerate(hdp.planned(source())):
        assert torch.equal(list.__getitem__(planned.batch, 0)["tokens"], documents(LENGTHS, number)[0]["tokens"])
        deadline = time.monotonic() + 60
        while len(taken) < min(number + 2, 5) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.02)
        assert len(taken) == min(number + 2, 5)
    assert {name.partition("_")[0] for name in where} == {"bytescale-planner"}
    require_no_planners()


def test_labels_of_a_batch_come_from_a_function(llama: nn.Module) -> None:
    hdp = bytescale.HDP(llama, capacity_tokens=45)
    batch = documents([20, 9, 20, 9])
    (planned,) = hdp.planned([batch], together=lambda own: [len(document["tokens"]) for document in own])
    assert sorted(sorted(own.documents) for own in planned.micro_batches) == [[0, 2], [1, 3]]
    with pytest.raises(PlanError):
        next(hdp.planned([batch], together=lambda own: [0] * len(own), capacity_tokens=30))


@pytest.mark.parametrize("wrong", ["of the source", "of the documents", "of the plan"])
def test_an_error_comes_at_the_turn_of_its_batch(llama: nn.Module, looked_at: None, wrong: str) -> None:
    """On all ranks, in the training thread; the loop over the batches before has run."""
    errors = {"of the source": (OSError, "is gone"), "of the documents": (DataError, "not be numbers")}
    kind, message = errors.get(wrong, (PlanError, "1000 tokens"))

    def source() -> Iterator[list[dict[str, Any]]]:
        yield documents(LENGTHS, 0)
        yield documents(LENGTHS, 1)
        if wrong == "of the source":
            raise OSError("the disk is gone")
        broken = documents(LENGTHS if wrong == "of the documents" else [1000], 2)
        broken[0]["weights"][0] = float("nan") if wrong == "of the documents" else 1.0
        yield broken

    def work(group: Any, model: nn.Module) -> int:
        hdp = bytescale.HDP(model, group, capacity_tokens=60)
        hdp.adamw(lr=1e-2)
        seen = 0
        with pytest.raises(kind, match=message):  # noqa: PT012
            for planned in hdp.planned(source()):
                for micro in planned:
                    micro.loss_sum(model).backward()
                hdp.step()
                seen += 1
        return seen

    assert on_ranks(2, llama, work) == [2, 2]
    require_no_planners()


def test_ranks_with_different_batches_are_told_when_its_turn_comes(llama: nn.Module, looked_at: None) -> None:
    def work(group: Any, model: nn.Module) -> None:
        hdp = bytescale.HDP(model, group, capacity_tokens=60)
        planned = hdp.planned([documents(LENGTHS, 0), documents(LENGTHS, group.rank())])
        next(planned)
        with pytest.raises(RankFailure):
            next(planned)

    on_ranks(2, llama, work)
    require_no_planners()


def test_leaving_the_loop_ends_the_thread(llama: nn.Module) -> None:
    hdp = bytescale.HDP(llama, capacity_tokens=200)
    batches = [documents(LENGTHS, seed) for seed in range(9)]
    for _ in hdp.planned(batches):
        assert len(planners()) == 1
        break
    require_no_planners()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for _ in hdp.planned(batches):
            raise ZeroDivisionError
    require_no_planners()
    hdp.planned(batches)  # nobody has begun to take them
    kept = hdp.planned(batches)
    next(kept)
    kept.close()
    require_no_planners()


def test_a_batch_is_not_begun_while_gradients_are_reduced(llama: nn.Module) -> None:
    """It is planned meanwhile; its turn comes after ``step()``."""
    hdp = bytescale.HDP(llama, capacity_tokens=200)
    hdp.adamw(lr=1e-2)
    planned = hdp.planned([documents(LENGTHS, seed) for seed in range(2)], last=True)
    for micro in next(planned):
        micro.loss_sum(llama).backward()
    with pytest.raises(ConfigError, match="A batch was planned after the loop"):
        next(planned)
    hdp.step()
    hdp.detach()
