"""Loops of one's own on stages and tensor-parallel ranks, and weights in parts, under NCCL's rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

import bytescale
from bytescale.hf.model import stages, tensor_parallel
from bytescale.parity import small_model
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.tied import TiedHead
from tests.nccl.recorder import Event, ZeroKernel, record
from tests.nccl.replay import Mismatch
from tests.nccl.test_nccl import assert_finishes
from tests.nccl.test_sharing import part

LENGTHS = [40, 9, 3, 17, 1, 5, 22]
Loop = Callable[[bytescale.HDP, Any, list[dict[str, Any]]], None]


@contextmanager
def without_numbers() -> Iterator[None]:
    """What was received means nothing: neither norms nor comparisons of models with their parts are looked at."""
    reduce = ShardedOptimizer.reduce_gradients

    def norm(self: ShardedOptimizer) -> float:
        reduce(self)
        return 1.0

    with (
        patch.object(RankGroup, "make_part", part),
        patch.object(ShardedOptimizer, "reduce_gradients", norm),
        patch.object(tensor_parallel, "difference", lambda *_: None),
        patch.object(stages, "_require_equal", lambda *_: None),
        patch("bytescale.runtime.optimizer.take_over.BUCKET_BYTES", 1),
    ):
        yield


def programs(ranks: int, loop: Loop, model: Any, batch: list[dict[str, Any]], **options: Any) -> list[list[Event]]:
    """All ranks' programs of attaching a model, and of the loop."""

    def steps(world: Mesh) -> None:
        own = model()
        hdp = bytescale.HDP(own, world.hdp.group, **{"capacity_tokens": 24, **options})
        mesh = hdp.mesh
        for group in [mesh.world, *mesh.ring_groups(), mesh.tp, *mesh.forward, *mesh.backward]:
            if group.group is not None:
                group.exchange = group.make_exchange(batched=True)
        hdp.engine._kernel = lambda dtype: ZeroKernel()  # type: ignore[assignment]
        hdp.adamw(lr=1e-3)
        loop(hdp, own, batch)

    with without_numbers():
        return record(MeshShape(hdp=ranks), steps)


def text() -> list[dict[str, Any]]:
    return [{"tokens": torch.arange(length) % 60} for length in LENGTHS]


def llama(layers: int = 4, **options: Any) -> Any:
    return lambda: small_model("llama", dtype=torch.float32, num_hidden_layers=layers, **options)


def two_steps(hdp: bytescale.HDP, model: Any, batch: list[dict[str, Any]]) -> None:
    """The printed loop with its body as a function; scores between the two."""
    for _ in range(2):
        hdp.plan(batch).forward_backward(lambda micro: micro.loss_sum(model))
        hdp.step()
        with torch.no_grad():
            hdp.plan(batch).forward_backward(lambda micro: hdp.collect(micro, micro.logprobs(model)))


def promised(hdp: bytescale.HDP, model: Any, batch: list[dict[str, Any]]) -> None:
    """Gradients are reduced while other ranks compute."""
    for _ in range(2):
        hdp.plan(batch, last=True).forward_backward(lambda micro: micro.loss_sum(model))
        hdp.step()


def sends_weights(hdp: bytescale.HDP, model: Any, batch: list[dict[str, Any]]) -> None:
    """An update, and then its weights for an inference engine, whole and in parts."""
    two_steps(hdp, model, batch)
    assert sum(1 for _ in hdp.weights(torch.bfloat16)) > 1
    assert sum(1 for _ in hdp.weight_parts(torch.bfloat16)) > 1
    two_steps(hdp, model, batch)


STAGES: list[tuple[int, Loop, dict[str, Any]]] = [
    (4, two_steps, {"pp": 2}),
    (4, promised, {"pp": 2}),
    (8, two_steps, {"pp": 4, "checkpointing": "full"}),
    (8, promised, {"pp": 2, "tp": 2}),
    (4, two_steps, {"pp": 2, "tie_word_embeddings": True}),
    (6, two_steps, {"pp": 3, "tie_word_embeddings": True, "checkpointing": "attention"}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "loop", "options"), STAGES)
def test_loops_on_stages_finish(ranks: int, loop: Loop, options: dict[str, Any]) -> None:
    tied = {name: value for name, value in options.items() if name == "tie_word_embeddings"}
    options = {name: value for name, value in options.items() if name not in tied}
    assert_finishes(programs(ranks, loop, llama(6 if options["pp"] == 3 else 4, **tied), text(), **options))


WEIGHTS: list[tuple[int, dict[str, Any]]] = [
    (4, {"tp": 2}),
    (4, {"pp": 2}),
    (4, {"shard": "parameters", "domain": 2}),
    (4, {"tp": 2, "shard": "parameters", "domain": 2}),
    (3, {}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "options"), WEIGHTS)
def test_weights_in_parts_between_steps_finish(ranks: int, options: dict[str, Any]) -> None:
    assert_finishes(programs(ranks, sends_weights, llama(), text(), **options))


@pytest.mark.exhaustive
def test_a_stage_that_keeps_its_tied_gradient_is_caught() -> None:
    """The owner waits for the copy's gradient, which the last stage does not send."""
    add = TiedHead.add_gradient

    def kept(self: TiedHead) -> None:
        if self._is_owner:
            add(self)

    with patch.object(TiedHead, "add_gradient", kept), pytest.raises((AssertionError, Mismatch)):
        assert_finishes(programs(4, two_steps, llama(tie_word_embeddings=True), text(), pp=2))
