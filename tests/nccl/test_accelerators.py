"""Runs on simulated accelerators, replayed under NCCL's rules: their messages depend on what ranks tell each other.

The recorder's ranks run alone and receive nothing. Here gloo moves the numbers, and what every host posts is noted.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bytescale import HDP
from bytescale.attention import Exchange
from bytescale.attention.kernels import CudaFlashKernel
from bytescale.attention.rings.exchange import Transfer
from bytescale.integrations.whole_batch import WholeBatch, word_columns
from bytescale.parity.compare import WideCasts
from tests.accelerator.device import Machine
from tests.accelerator.groups import Communicator, run_machines
from tests.accelerator.test_trainers import contrast, pairs
from tests.hf import test_whole_batch as batches
from tests.hf.support import small_model
from tests.hf.test_images import batch_of, model_of
from tests.nccl.recorder import Event, Post
from tests.nccl.replay import ALL_RULES, Mismatch, Replay
from tests.nccl.test_nccl import assert_finishes


def programs(num_ranks: int, model: Any, step: Any, **options: Any) -> list[list[Event]]:
    """All ranks' programs of two steps."""

    def one_rank(own: Machine, group: Communicator) -> None:
        ours = copy.deepcopy(model).to(own.device)
        hdp = HDP(ours, group, kernel="math", **options)
        hdp.engine._kernel = lambda dtype: CudaFlashKernel()  # type: ignore[method-assign, assignment]
        hdp.adamw(lr=1e-3)
        with WideCasts():
            for _ in range(2):
                step(hdp, ours)
                hdp.step()

    _, machines = run_machines(num_ranks, one_rank, logged=True)
    return [own.log.events for own in machines if own.log is not None]


def pictures(hdp: HDP, model: Any) -> None:
    """Rows of encoders travel to the ranks whose tokens they are, and their gradients back."""
    hdp.plan(batch_of("qwen2_5_vl")).forward_backward(lambda micro: micro.loss_sum(model))


def trainer(hdp: HDP, model: Any) -> None:
    """A whole batch of every rank, in one pass, and its reference in another one."""
    fields = batches.fields_of(hdp.group.rank)
    given = {name: [value.to(hdp.group.device) for value in column] for name, column in fields.items()}
    with torch.no_grad():
        WholeBatch(hdp, word_columns(model, count=2), num_trained=0).run(given)
    batch = WholeBatch(hdp, word_columns(model, count=2), num_trained=2)
    values, _ = batch.run(given, loss=batches.of_sequences)
    rows = [{name: column[place] for name, column in given.items()} for place in range(len(given["tokens"]))]
    batches.of_sequences(rows, list(values.split(batches.LENGTHS[hdp.group.rank]))).backward()
    batch.finish()


def coupled(hdp: HDP, model: Any) -> None:
    """Members of a group send one another the rows of their documents, amid micro-batches."""
    batch = [{n: v.to(hdp.group.device) if n == "old" else v for n, v in d.items()} for d in pairs()]
    hdp.backward(batch, contrast, together=[0, 0, 1, 1], passes=1)


def images_of(num_ranks: int, **options: Any) -> list[list[Event]]:
    return programs(num_ranks, model_of("qwen2_5_vl", 2), pictures, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (3, {"capacity_tokens": 50}),
        (4, {"capacity_tokens": 50, "tp": 2}),
        (2, {"capacity_tokens": 400, "tp": 2, "checkpointing": "full"}),
        (2, {"capacity_tokens": 50, "shard": "parameters", "domain": 2}),
    ],
)
def test_pictures_finish(num_ranks: int, options: dict[str, Any]) -> None:
    assert_finishes(images_of(num_ranks, **options))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("num_ranks", "step", "options"), [(2, trainer, {"capacity_tokens": 40}), (3, coupled, {"capacity_tokens": 60})]
)
def test_batches_of_trainers_and_coupled_losses_finish(num_ranks: int, step: Any, options: dict[str, Any]) -> None:
    posted = programs(num_ranks, small_model("llama"), step, **options)
    assert sum(isinstance(event, Post) and bool(event.ends) for event in posted[0]) > 8, "rings are among them"
    assert_finishes(posted)


@pytest.mark.exhaustive
def test_rows_of_documents_that_are_sent_one_by_one_are_caught() -> None:
    """A send and then a receive, each an operation of its own: two members wait for each other."""
    start = Exchange.start

    def one_by_one(self: Exchange, *, send: Any, receive: Any, **options: Any) -> Transfer:
        if send is None or receive is None:
            return start(self, send=send, receive=receive, **options)
        first = start(self, send=send, receive=None, **options)
        second = start(self, send=None, receive=receive, **options)
        return replace(second, works=[*first.works, *second.works])

    with patch.object(Exchange, "start", one_by_one):
        posted = programs(3, small_model("llama"), coupled, capacity_tokens=60)
    assert is_caught(posted)


def is_caught(programs: list[list[Event]]) -> bool:
    """Whether ranks would hang, or meet in different operations."""
    try:
        return any(Replay(programs, rules).run() for rules in ALL_RULES)
    except Mismatch:
        return True


@pytest.mark.exhaustive
def test_an_operation_that_a_rank_leaves_out_is_caught() -> None:
    """Of every kind that pictures post: a rank's last one."""
    posted = images_of(2, capacity_tokens=50)
    kinds = {event.collective.split(" ")[0] for event in posted[1] if isinstance(event, Post)}
    for kind in kinds:
        last = max(
            n for n, event in enumerate(posted[1]) if isinstance(event, Post) and event.collective.startswith(kind)
        )
        assert is_caught([posted[0], [*posted[1][:last], *posted[1][last + 1 :]]]), kind
