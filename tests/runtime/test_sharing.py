"""Our own models, whose layers a lockstep domain shares, on tensor-parallel meshes: the numbers of one process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from bytescale.attention import select_kernel
from bytescale.common.cut import Cut
from bytescale.config.architecture import Architecture
from bytescale.config.schema import Experts, OptimizerConfig
from bytescale.cost.memory.model import MemoryModel
from bytescale.cost.memory.rows import ModelShare
from bytescale.parity.compare import random_plan
from bytescale.plan import Plan, RankPlan
from bytescale.runtime.executor import Decoder, Executor
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.optimizer.zero import sum_replicas
from bytescale.runtime.saved.activations import Activations
from bytescale.train.parts.own_model import OwnModel, build_own_model
from bytescale.train.parts.tensor_parallel import row_wise_parts
from tests.helpers.ranks import run_mesh
from tests.helpers.steps import Batch, make_model, random_batch, reference_step, slice_batch, worst_relative_error
from tests.runtime.test_mesh_parity import MIXTURE, mesh_shape, put_together
from tests.runtime.test_moe_parity import reference as mixture_reference

LENGTHS = [33, 5, 18, 1, 9, 27, 2]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "mixtral": MIXTURE,
    "experts in parallel": MIXTURE,
}
CASES = [
    (name, hdp, tp, domain, seed)
    for name in FAMILIES
    for hdp, tp, domain in ((2, 1, 2), (4, 1, 2), (4, 1, 4), (2, 2, 2), (4, 2, 2), (2, 4, 2))
    for seed in range(3)
    if tp == 1 or name != "experts in parallel"
]


def built(
    shape: Architecture, mesh: Mesh, dtype: torch.dtype, *, experts: Experts = "gathered", **optimizer: Any
) -> tuple[OwnModel, ShardedOptimizer]:
    model = build_own_model(shape, mesh, dtype=dtype, seed=0, bucket_bytes=4096, experts=experts)
    config = OptimizerConfig(lr=1e-2, **optimizer)
    return model, ShardedOptimizer.of_config(model.parameters, config, mesh, more=model.more, units=model.units)


def run(model: OwnModel, mesh: Mesh, plan: Plan, batch: Batch, checkpointing: Any) -> Any:
    module = model.module
    activations = Activations(
        list(module.layers), checkpointing=checkpointing, tp=mesh.tp, row_wise=row_wise_parts(module, mesh.tp.size)
    )
    kernel = select_kernel("auto", torch.device("cpu"), next(module.parameters()).dtype)
    part = Decoder(module=module, activations=activations)
    own = RankPlan.of(plan, mesh.hdp.rank)
    data = [slice_batch(batch, micro_batch) for micro_batch in own.micro_batches]
    executor = Executor(part=part, kernel=kernel, mesh=mesh, units=model.units)
    return executor.run(own, data, num_global_targets=batch.num_targets)


@pytest.mark.parametrize(
    ("name", "hdp", "tp", "domain", "seed"),
    [
        ("tied", 4, 1, 2, 0),
        ("mixtral", 2, 2, 2, 1),
        ("experts in parallel", 4, 1, 2, 1),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in CASES),
    ],
)
def test_gradients_are_those_of_one_process(name: str, hdp: int, tp: int, domain: int, seed: int) -> None:
    shape = mesh_shape(**FAMILIES[name])
    batch = random_batch(LENGTHS, shape.vocab_size, seed)
    plan = random_plan(LENGTHS, hdp, seed, domain=domain)

    def one_rank(mesh: Mesh) -> tuple[float, dict[str, Any]]:
        model, optimizer = built(shape, mesh, torch.float64, experts="parallel" if "parallel" in name else "gathered")
        assert model.units is not None
        result = run(model, mesh, plan, batch, ("none", "full", "attention")[seed % 3])
        for zero in optimizer.zeros:
            sum_replicas(zero.parameters, mesh.tp)
        cuts = {entry.name: entry.cut for zero in optimizer.zeros for entry in zero.parameters.entries}
        gradients = {
            key: (cuts[key] if value.shape == cuts[key].part_shape else Cut(shape=tuple(value.shape)), value)
            for key, value in optimizer.whole_gradients().items()
        }
        return result.loss_sum, gradients if mesh.hdp.rank == 0 else {}

    results = run_mesh(MeshShape(hdp=hdp, tp=tp), one_rank, domain=domain)
    if shape.num_experts:
        loss, _, wanted = mixture_reference(shape, torch.float64, batch)
    else:
        reference = reference_step(make_model(shape, torch.float64), batch)
        loss, wanted = reference.loss, reference.gradients
    assert sum(own for own, _ in results) / batch.num_targets == pytest.approx(loss, rel=1e-10)
    assert worst_relative_error(put_together([own for _, own in results], shape.tie_embeddings), wanted) <= 1e-10


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("llama", 2),
        ("experts in parallel", 1),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("llama", 1), ("mixtral", 1), ("mixtral", 2))),
    ],
)
def test_a_rank_holds_what_the_memory_model_says(name: str, tp: int) -> None:
    """Bytes between two steps, with the optimizer in host memory; and what two open layers add."""
    shape, parallel = mesh_shape(**FAMILIES[name]), name == "experts in parallel"
    batch, plan = random_batch(LENGTHS, shape.vocab_size, 0), random_plan(LENGTHS, 4, 0, domain=2)

    def one_rank(mesh: Mesh) -> tuple[int, int, int]:
        model, optimizer = built(
            shape, mesh, torch.bfloat16, experts="parallel" if parallel else "gathered", offload=True
        )
        run(model, mesh, plan, batch, "full")
        optimizer.reduce_gradients()
        optimizer.update(1.0, 0.0)
        optimizer.wait_for_parameters()
        flat = [model.parameters, *model.more]
        held = [*model.module.parameters(), *(own.values for own in model.more)]
        values = sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in held}.values())
        states = [value for own in optimizer.torch_optimizer.state.values() for value in own.values() if value.dim()]
        masters = [shard.master for zero in optimizer.zeros for shard in zero.shards]
        assert optimizer._host is not None
        on_host = sum(value.nbytes for value in [*states, *masters, *optimizer._host._buffers])
        return values, sum(own.gradients.nbytes for own in flat), on_host

    share = ModelShare(architecture=shape, tensor_parallel=tp)
    counted = MemoryModel(
        share=share, element_bytes=2, num_ranks=4, domain=2, optimizer_on_host=True, experts_in_parallel=parallel
    ).states
    experts = counted.trained_experts if parallel else [0] * len(counted.trained_of_units)
    gathered = [units - own for units, own in zip(counted.trained_of_units, experts, strict=True)]
    both = max(a + b for a, b in pairwise(gathered))  # the units that are open while they compute
    for values, gradients, host in run_mesh(MeshShape(hdp=4, tp=tp), one_rank, domain=2):
        padding = 64 * 4 * 6  # elements
        assert 0 <= values - (counted.parameter_bytes - 2 * both) <= 2 * padding
        assert 0 <= gradients - (counted.gradient_bytes - 4 * both) <= 4 * padding
        assert host == pytest.approx(counted.host_bytes, rel=0.2)
