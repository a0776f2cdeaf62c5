"""Users' loops under NCCL's rules: gradients that are reduced while other ranks are in their rings."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

import bytescale
from bytescale.parity import small_model
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from tests.nccl.recorder import Event, ZeroKernel, record
from tests.nccl.replay import STREAMS_ONLY, Replay
from tests.nccl.steps import uneven
from tests.nccl.test_nccl import assert_finishes, plan_of


def loop(plan: Plan, *, last: bool = True) -> list[list[Event]]:
    """All ranks' programs of two steps of the printed loop."""

    def steps(mesh: Mesh) -> None:
        model = small_model("llama", dtype=torch.float32, num_hidden_layers=2)
        hdp = bytescale.HDP(model, mesh.hdp.group, capacity_tokens=64)
        hdp.group.exchange = hdp.group.make_exchange(batched=True)
        hdp.engine._kernel = lambda dtype: ZeroKernel()
        hdp.adamw(lr=1e-3)
        documents = [{"tokens": torch.arange(length) % 60} for length in plan.lengths.tolist()]
        for _ in range(2):
            for micro in hdp.plan(documents, plan=plan, last=last):
                micro.loss_sum(model).backward()
            hdp.step()

    reduce = ShardedOptimizer.reduce_gradients

    def norm(self: ShardedOptimizer) -> float:
        reduce(self)
        return 1.0  # nothing was received, so that numbers mean nothing

    with (
        patch("bytescale.runtime.optimizer.take_over.BUCKET_BYTES", 1),
        patch.object(ShardedOptimizer, "reduce_gradients", norm),
    ):
        return record(MeshShape(hdp=plan.num_ranks), steps)


def mixed() -> Plan:
    """Rank 0 ends alone while 1 and 2 share; rank 3 has nothing."""
    return Plan.build(
        lengths=[20, 9, 24],
        capacity_tokens=[40] * 4,
        groups=[
            GroupSpec(sequences=[0], ranks=[0, 1]),
            GroupSpec(sequences=[1], ranks=[0]),
            GroupSpec(sequences=[2], ranks=[1, 2]),
        ],
        schedule=[[[0], [1]], [[0], [2]], [[2]], []],
    )


@pytest.mark.parametrize(
    "plan", [mixed(), uneven([1, 2, 3], [9, 14]), plan_of("adaptive", [40, 9, 3, 17, 1], MeshShape(hdp=3))]
)
def test_loops_that_reduce_while_ranks_compute_finish(plan: Plan) -> None:
    assert_finishes(loop(plan))


def test_a_reduction_amid_a_ring_is_caught() -> None:
    """Rank 0 would begin in the backward of a micro-batch that it shares; the others come to it behind their rings."""
    expect = ShardedOptimizer.expect_last_backward
    with patch.object(
        ShardedOptimizer, "expect_last_backward", lambda self, silent: expect(self, self.group.rank == 0)
    ):
        programs = loop(uneven([1, 1], [9]))
    assert Replay(programs, STREAMS_ONLY).run()
