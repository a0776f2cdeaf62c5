"""The trainer's steps on simulated accelerators: meshes, pipelines, buckets, offloading; and faults that are planted.

Every planted fault is one line of the runtime that somebody could forget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from bytescale.attention.rings.exchange import Transfer
from bytescale.plan import Plan, RankPlan
from bytescale.runtime import executor, loss
from bytescale.runtime.group import PendingCollective
from bytescale.runtime.mesh import MeshShape
from bytescale.runtime.optimizer.host_states import HostTransfers
from bytescale.runtime.saved import offload
from bytescale.runtime.saved.copy_lane import CopyLane
from bytescale.runtime.saved.host_pool import HostPool
from tests.accelerator import meshes
from tests.accelerator.loops import Outcome, labelled
from tests.accelerator.meshes import run_steps
from tests.accelerator.test_loops import LENGTHS, require_clean
from tests.helpers.effort import one_of
from tests.hf.mesh_steps import plan_of
from tests.hf.support import documents, small_model

MESHES: list[tuple[str, MeshShape, dict[str, Any]]] = [
    ("llama", MeshShape(hdp=2), {"bucket_bytes": 1, "on_host": True, "moves": True, "layers": 3}),
    ("llama", MeshShape(hdp=1), {}),
    ("llama", MeshShape(hdp=3), {"bucket_bytes": 1}),
    ("llama", MeshShape(hdp=2), {"moves": True, "layers": 5, "checkpointing": "full"}),
    ("llama", MeshShape(hdp=2), {"moves": True, "layers": 5, "checkpointing": "attention"}),
    ("mixtral", MeshShape(hdp=2, tp=2), {"bucket_bytes": 1}),
    ("llama", MeshShape(pp=2, hdp=2), {"bucket_bytes": 1}),
    ("llama", MeshShape(pp=3, hdp=1), {"layers": 3, "on_host": True}),
    ("qwen3", MeshShape(pp=2, hdp=1), {}),
    ("llama", MeshShape(pp=2, hdp=1, tp=2), {}),
    ("llama", MeshShape(pp=2, hdp=1), {"moves": True, "layers": 6}),
    ("qwen3_next", MeshShape(hdp=2), {"bucket_bytes": 1}),
]
"""Model, mesh and options; ``qwen3`` ties its head to the embedding. Activations that move are on the host."""


def busy_plan(shape: MeshShape) -> Plan:
    """A plan in which ranks share micro-batches and have others alone, of several that are drawn."""

    def shared(plan: Plan) -> tuple[bool, int]:
        own = [RankPlan.of(plan, rank).micro_batches for rank in range(shape.hdp)]
        return min(map(len, own)) >= 2, sum(one.shared is not None for part in own for one in part)

    return max((plan_of(LENGTHS, shape, seed) for seed in range(20)), key=shared)


def steps(family: str, shape: MeshShape, *, moves: bool = False, layers: int = 2, **options: Any) -> Outcome:
    plan = busy_plan(shape)
    if moves:
        ratios = ([0.5, 1.0, 0.3] * plan.num_groups)[: plan.num_groups]
        plan = replace(plan, group_offload_ratio=np.array(ratios))
    model = small_model(family, num_hidden_layers=layers)
    batch = labelled(documents(LENGTHS))
    return run_steps(model, batch, shape, plan, offload=moves, **options)


@pytest.mark.parametrize(("family", "shape", "options"), one_of(MESHES, MESHES[0]))
def test_steps_are_clean(family: str, shape: MeshShape, options: dict[str, Any]) -> None:
    require_clean(steps(family, shape, **options))


copy = CopyLane.copy


def do_nothing(*unused: object) -> None:
    """In the place of a wait."""


def without_events(self: CopyLane, pairs: Iterable[tuple[Tensor, Tensor]], *, after: object) -> object:
    return copy(self, pairs, after=[])


def numbers_alone(pending: Any) -> None:
    """The host has the numbers, and the stream was told nothing."""
    works = pending.works if isinstance(pending, Transfer) else [pending.work] if pending.work else []
    for work in works:
        for real in work.real:
            real.wait()


def let_go_at_once(self: offload._LayerPass) -> None:
    self._sources.clear()
    self._seen.clear()


move = offload._LayerPass._move


def holds_nothing(self: offload._LayerPass, region: Tensor, num_moved: int) -> offload._Block:
    block = move(self, region, num_moved)
    self._sources.pop()
    return block


def waits_for_the_first_copy(self: offload._LayerPass, region: Tensor, num_moved: int) -> offload._Block:
    first = self._copied
    block = move(self, region, num_moved)
    self._copied = first or self._copied
    return block


def into_memory_that_may_be_used(
    self: CopyLane, pairs: Iterable[tuple[Tensor, Tensor]], *, after: Iterable[Any]
) -> object:
    """A copy that waits for the last event alone, which is that of its source."""
    return copy(self, pairs, after=[*after][1:])


def as_it_is(host: Tensor, device: torch.device) -> Tensor:
    return host


def without_waiting(self: HostTransfers) -> Tensor:
    if self._number + 1 < len(self._shards):
        self._bring(self._number + 1)
    return self._buffer(self._number)


def unpinned(host: Tensor, device: torch.device) -> Tensor:
    return host.to(device, non_blocking=True)


def blocking(host: Tensor, device: torch.device) -> Tensor:
    return host.to(device)


class PageablePool(HostPool):
    def __init__(self, limit_bytes: int, **options: Any) -> None:
        super().__init__(limit_bytes, **{**options, "pinned": False})


def and_looks(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        result = method(*args, **kwargs)
        assert float(result.detach()) >= 0
        return result

    return call


OFFLOAD: dict[str, Any] = {"moves": True, "layers": 3}
LOOKS = and_looks(loss.loss_sum)
PLANTED: dict[str, tuple[str, Any, str, Any, dict[str, Any]]] = {
    "a copy lane that waits for nothing": ("race", CopyLane, "copy", without_events, OFFLOAD),
    "activations that compute does not wait for": ("race", offload, "compute_waits", do_nothing, OFFLOAD),
    "activations given back while they are copied": (
        *("early free", offload._LayerPass, "let_go"),
        *(let_go_at_once, OFFLOAD),
    ),
    "activations that are not held while they are copied": (
        *("early free", offload._LayerPass, "_move"),
        *(holds_nothing, OFFLOAD),
    ),
    "activations given back after the first copy": (
        *("early free", offload._LayerPass, "_move"),
        *(waits_for_the_first_copy, OFFLOAD),
    ),
    "activations copied into memory that compute may still use": (
        *("race", CopyLane, "copy"),
        *(into_memory_that_may_be_used, OFFLOAD),
    ),
    "tokens left in host memory": ("mix", executor, "to_device", as_it_is, {}),
    "labels left in host memory": ("mix", loss, "to_device", as_it_is, {}),
    "pages that are not page-locked": ("mix", meshes, "HostPool", PageablePool, OFFLOAD),
    "a ring that reads before its message is there": ("race", Transfer, "wait", numbers_alone, {}),
    "an update before the reduction": ("race", PendingCollective, "wait", numbers_alone, {"bucket_bytes": 1}),
    "a host that updates before gradients are there": (
        *("race", HostTransfers, "fetch"),
        *(without_waiting, {"on_host": True}),
    ),
    "tokens copied from memory that is not page-locked": ("mix", executor, "to_device", unpinned, {}),
    "tokens for which the host waits": ("wait", executor, "to_device", blocking, {}),
    "labels for which the host waits": ("wait", loss, "to_device", blocking, {}),
    "a loss that somebody looks at": ("wait", executor, "loss_sum", LOOKS, {}),
}
"""Kind of the fault, what is replaced by what, and options of the step."""


@pytest.mark.parametrize("name", one_of(list(PLANTED), "tokens for which the host waits"))
def test_faults_that_are_planted_in_the_runtime_are_found(name: str) -> None:
    kind, owner, what, fault, options = PLANTED[name]
    with mock.patch.object(owner, what, fault):
        outcome = steps("llama", MeshShape(hdp=1 if kind == "wait" else 2), **options)
    if kind == "wait":
        assert outcome.waits_per_micro_batch > 0
    else:
        assert kind in {fault.kind for fault in outcome.faults}
