"""Units that a lockstep domain gathers amid rings, under NCCL's rules, and faults of their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import bytescale
from bytescale.attention import RingBuffers
from bytescale.cost.model import CostModel
from bytescale.parity import small_model
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.plan.verify import verify
from bytescale.runtime.executor import Decoder, Executor, _Run
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.lockstep import Units
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.optimizer.units import Unit
from tests.helpers.effort import one_of
from tests.helpers.steps import random_batch, slice_batch
from tests.nccl.recorder import Event, Post, RecordedGroup, ZeroKernel, record
from tests.nccl.replay import ALL_RULES, Mismatch, Replay
from tests.nccl.steps import training_step
from tests.nccl.test_nccl import assert_finishes


def across_domains() -> Plan:
    """Pairs share in the first round, two ranks of different domains in the second, all in the third; one goes on."""
    groups = [([0, 1],), ([2, 3],), ([0],), ([1, 2],), ([3],), ([3, 0, 2, 1],), ([0],)]
    return Plan.build(
        lengths=[20, 9, 4, 14, 5, 30, 7],
        capacity_tokens=[40] * 4,
        groups=[GroupSpec(sequences=[n], ranks=ranks) for n, (ranks,) in enumerate(groups)],
        schedule=[[[0], [2], [5], [6]], [[0], [3], [5]], [[1], [3], [5]], [[1], [4], [5]]],
        domain=2,
    )


def idle_domain() -> Plan:
    """One rank has all the work of its domain of two; the other domain has none at all."""
    return Plan.build(
        lengths=[9, 5],
        capacity_tokens=[40] * 4,
        groups=[GroupSpec(sequences=[0], ranks=[1]), GroupSpec(sequences=[1], ranks=[1])],
        schedule=[[], [[0], [1]], [], []],
        domain=2,
    )


def of_planner(domain: int) -> Plan:
    planner = bytescale.make_planner(num_ranks=4, capacity_tokens=16, domain=domain, cost=CostModel.from_work())
    return planner(np.array([40, 9, 3, 17, 1, 5]))


def user_loop(plan: Plan, hdp: bytescale.HDP, model: Any) -> None:
    """The printed loop: a rank without work in a round runs a row that stands for no token."""
    documents = [{"tokens": torch.arange(length) % 60} for length in plan.lengths.tolist()]
    for micro in hdp.plan(documents, plan=plan):
        micro.loss_sum(model).backward()


def trainer_loop(plan: Plan, hdp: bytescale.HDP, model: Any) -> None:
    """The executor, whose ranks without work in a round run no model; and an evaluation."""
    batch = random_batch(plan.lengths.tolist(), 60, 0, masked_share=0.0)
    decoder, units = hdp.engine.decoder, hdp.sharded().units
    part = Decoder(module=decoder, activations=hdp.engine.activations, head=decoder.head)
    executor = Executor(part=part, kernel=ZeroKernel(), mesh=hdp.sharded().mesh, units=units)
    rank_plan = RankPlan.of(plan, hdp.group.rank)
    data = [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches]
    executor.run(rank_plan, data, num_global_targets=batch.num_targets)
    executor.evaluate(rank_plan, data)


def part(self: RankGroup, name: str, ranks: Sequence[int]) -> RecordedGroup:
    group: Any = self.group
    return RecordedGroup(group.log, name, ranks)


def telling(name: str) -> Any:
    """The method of ``Unit``, whose collectives tell their unit, and which may wait for its device."""
    method = getattr(Unit, name)

    def tells(self: Unit) -> Any:
        group: Any = self.store.domain.group
        group.subject = f" of unit {self.number}"
        group.log.compute()
        return method(self)

    return patch.object(Unit, name, tells)


def programs(
    plan: Plan, loop: Callable[..., None], checkpointing: Any = "none", *, family: str = "llama", **options: Any
) -> list[list[Event]]:
    """All ranks' programs of a step."""
    verify(plan)
    reduce = ShardedOptimizer.reduce_gradients

    def norm(self: ShardedOptimizer) -> float:
        reduce(self)
        return 1.0  # nothing was received, so that numbers mean nothing

    def steps(mesh: Mesh) -> None:
        model = small_model(family, dtype=torch.float32, num_hidden_layers=3)
        shared: dict[str, Any] = {"capacity_tokens": 64, "shard": "parameters", "domain": plan.domain}
        hdp = bytescale.HDP(model, mesh.hdp.group, checkpointing=checkpointing, **shared, **options)
        hdp.group.exchange = hdp.group.make_exchange(batched=True)
        hdp.engine._kernel = lambda dtype: ZeroKernel()  # type: ignore[assignment]
        hdp.adamw(lr=1e-3)
        loop(plan, hdp, model)
        hdp.step()

    with (
        patch.object(RankGroup, "make_part", part),
        patch.object(ShardedOptimizer, "reduce_gradients", norm),
        telling("start_gather"),
        telling("begin_gradients"),
        telling("start_reduction"),
    ):
        return record(MeshShape(hdp=plan.num_ranks), steps)


@pytest.mark.parametrize("loop", one_of([user_loop, trainer_loop], trainer_loop))
@pytest.mark.parametrize("checkpointing", one_of(["none", "full"], "full"))
@pytest.mark.parametrize(
    "plan",
    [
        across_domains(),
        *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (idle_domain(), of_planner(2), of_planner(4))),
    ],
    ids=lambda plan: f"domains of {plan.domain}, {plan.num_micro_batches} micro-batches",
)
def test_gathers_amid_rings_finish_under_all_rules(plan: Plan, loop: Callable[..., None], checkpointing: str) -> None:
    assert_finishes(programs(plan, loop, checkpointing))


@pytest.mark.parametrize("loop", one_of([user_loop, trainer_loop], trainer_loop))
@pytest.mark.parametrize("checkpointing", one_of(["none", "full", "attention"], "full"))
@pytest.mark.parametrize(
    "plan",
    [across_domains(), *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (idle_domain(), of_planner(4)))],
    ids=lambda plan: f"domains of {plan.domain}, {plan.num_micro_batches} micro-batches",
)
def test_tokens_that_travel_to_experts_amid_rings_and_gathers_finish(
    plan: Plan, loop: Callable[..., None], checkpointing: str
) -> None:
    """Rows go where a rank's own router sends them, so that ranks post messages of different sizes."""
    posted = programs(plan, loop, checkpointing, family="mixtral", experts="parallel")
    assert any("all-to-all" in event.collective for event in posted[0] if isinstance(event, Post))
    assert_finishes(posted)


def test_a_rank_that_leaves_experts_out_without_work_is_caught() -> None:
    def few(self: Executor, rank_plan: RankPlan, data: Any, number: float, beside: Any) -> _Run:
        return _Run(self, rank_plan.micro_batches, data, number, beside, RingBuffers())

    with patch.object(Executor, "_begin", few):
        assert is_caught(programs(across_domains(), trainer_loop, family="mixtral", experts="parallel"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("plan", [across_domains(), pytest.param(of_planner(2), marks=pytest.mark.exhaustive)])
def test_gathers_amid_rings_and_tensor_parallelism_finish(plan: Plan, on_host: bool) -> None:
    """A mixture, whose routers stay whole, with an optimizer that may be in host memory."""
    step = training_step(plan, 3, family="mixtral", checkpointing="full", on_host=on_host)
    with telling("start_gather"), telling("begin_gradients"), telling("start_reduction"):
        assert_finishes(record(MeshShape(hdp=4, tp=2), step, domain=2))


def is_caught(programs: list[list[Event]]) -> bool:
    """Whether ranks would hang, or gather different layers together."""
    try:
        return any(Replay(programs, rules).run() for rules in ALL_RULES)
    except Mismatch:
        return True


def test_a_rank_that_skips_rounds_without_work_is_caught() -> None:
    with patch.object(Units, "pass_without_work", lambda *given, **options: None):
        assert is_caught(programs(across_domains(), trainer_loop))


def test_a_rank_that_gathers_layers_in_another_order_is_caught() -> None:
    """In every domain, the second rank gathers the first layer before it reduces the last one."""
    step = Units._step_backward

    def hasty(self: Units) -> None:
        if self.stores[0].domain.rank and self._backward == 3:
            self._start([1])
        step(self)

    with patch.object(Units, "_step_backward", hasty):
        assert is_caught(programs(across_domains(), user_loop))
