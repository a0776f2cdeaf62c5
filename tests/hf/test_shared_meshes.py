"""Decoders whose layers a lockstep domain shares, on meshes with tensor parallelism: the numbers of one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bytescale.attention import select_kernel
from bytescale.config.schema import OptimizerConfig
from bytescale.cost.memory.device_memory import States
from bytescale.cost.memory.measured import MeasuredRows
from bytescale.hf.model.measure import measured_memory
from bytescale.parity import Setup, small_model
from bytescale.parity.compare import Document, WideCasts, plain_step, random_documents, random_plan
from bytescale.plan import Plan, RankPlan
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from tests.helpers.ranks import run_mesh
from tests.helpers.steps import Batch, slice_batch, worst_relative_error

from .mesh_steps import RankModel, rank_model

LENGTHS = (33, 5, 18, 1, 9, 27, 2)
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {}, "mixtral": {}}
"""Of Qwen3, embedding and head are one."""
NOTHING_SAVED = MeasuredRows(saved_per_token=0, peak_per_token=0, fixed=0)
CASES = [
    (name, hdp, tp, domain, seed)
    for name in FAMILIES
    for hdp, tp, domain in ((2, 1, 2), (4, 1, 2), (4, 1, 4), (2, 2, 2), (4, 2, 2), (2, 4, 2))
    for seed in range(3)
]


def model_of(name: str, **changes: Any) -> nn.Module:
    return small_model(name, num_hidden_layers=4, vocab_size=68, **changes)


def run(model: RankModel, mesh: Mesh, plan: Plan, documents: list[Document], checkpointing: str) -> float:
    """One step's share of the loss."""
    batch = Batch(*([document[name] for document in documents] for name in ("tokens", "labels", "weights")))
    own = RankPlan.of(plan, mesh.hdp.rank)
    kernel = select_kernel("auto", torch.device("cpu"), next(model.decoder.parameters()).dtype)
    executor = model.executor(mesh, kernel, checkpointing=checkpointing)
    data = [slice_batch(batch, micro_batch) for micro_batch in own.micro_batches]
    total = float(sum(document["weights"].sum() for document in documents))
    return executor.run(own, data, num_global_targets=total).loss_sum / total


@pytest.mark.parametrize(
    ("name", "hdp", "tp", "domain", "seed"),
    [("mixtral", 2, 2, 2, 1), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in CASES)],
)
def test_gradients_are_those_of_one_process(name: str, hdp: int, tp: int, domain: int, seed: int) -> None:
    whole = model_of(name)
    documents = random_documents(whole, Setup(lengths=LENGTHS, seed=seed))
    plan = random_plan(LENGTHS, hdp, seed, domain=domain)

    def one_rank(mesh: Mesh) -> tuple[float, dict[str, Tensor]]:
        with WideCasts():
            model = rank_model(whole, mesh)
            assert model.units is not None
            optimizer = ShardedOptimizer.of_config(
                model.parameters, OptimizerConfig(), mesh, more=model.more, units=model.units
            )
            loss = run(model, mesh, plan, documents, ("none", "full", "attention")[seed % 3])
        return loss, optimizer.whole_gradients()

    results = run_mesh(MeshShape(hdp=hdp, tp=tp), one_rank, domain=domain)
    reference = plain_step(copy.deepcopy(whole), documents)
    assert sum(own for own, _ in results) == pytest.approx(reference.loss, rel=1e-10)
    for _, gradients in results:
        assert worst_relative_error(gradients, reference.gradients) <= 1e-10


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "tp"), [("llama", 2), *(pytest.param("mixtral", tp, marks=pytest.mark.exhaustive) for tp in (1, 2))]
)
def test_a_rank_holds_what_the_memory_model_says(name: str, tp: int) -> None:
    """Bytes between two steps, with the optimizer in host memory; and what two open layers add."""
    whole = model_of(name, dtype=torch.bfloat16)
    documents, plan = random_documents(whole, Setup(lengths=LENGTHS)), random_plan(LENGTHS, 4, 0, domain=2)

    def one_rank(mesh: Mesh) -> tuple[int, int, int, States]:
        model = rank_model(whole, mesh)
        optimizer = ShardedOptimizer.of_config(
            model.parameters, OptimizerConfig(offload=True), mesh, more=model.more, units=model.units
        )
        run(model, mesh, plan, documents, "full")
        optimizer.reduce_gradients()
        optimizer.update(1.0, 0.0)
        optimizer.wait_for_parameters()
        held = [*model.decoder.parameters(), *(own.values for own in model.more)]
        values = sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in held}.values())
        gradients = sum(own.gradients.nbytes for own in (model.parameters, *model.more))
        states = [value for own in optimizer.torch_optimizer.state.values() for value in own.values() if value.dim()]
        masters = [shard.master for zero in optimizer.zeros for shard in zero.shards]
        assert optimizer._host is not None
        on_host = sum(value.nbytes for value in [*states, *masters, *optimizer._host._buffers])
        counted = measured_memory(model.decoder, NOTHING_SAVED, kind="cpu", num_ranks=4).states
        return values, gradients, on_host, replace(counted, domain=2, on_host=True)

    for values, gradients, on_host, counted in run_mesh(MeshShape(hdp=4, tp=tp), one_rank, domain=2):
        both = max(a + b for a, b in pairwise(counted.trained_of_units))  # the units that are open while they compute
        padding = 64 * 4 * 6  # elements
        assert 0 <= values - (counted.parameter_bytes - 2 * both) <= 2 * padding
        assert 0 <= gradients - (counted.gradient_bytes - 4 * both) <= 4 * padding
        assert on_host == pytest.approx(counted.host_bytes, rel=0.2)
