"""The promise over the whole mesh: any tensor x pipeline x hybrid data parallelism gives one process's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from torch import Tensor

from bytescale.attention import select_kernel
from bytescale.common.cut import Cut
from bytescale.config.architecture import Architecture
from bytescale.config.schema import PlannerConfig
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.cost.split import split_layers
from bytescale.models import Llama, build_model
from bytescale.models.compiled import RowCompiler, apply_compiled
from bytescale.models.head_groups import apply_head_groups
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.plan.verify import verify
from bytescale.planner.adaptive.aligned import align
from bytescale.planner.make import make_planner
from bytescale.runtime.executor import Decoder, Executor
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.zero import sum_replicas
from bytescale.runtime.pipeline import StageLinks
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.saved.host_pool import HostPool
from bytescale.runtime.token_shards import TokenShards
from bytescale.train.parts.tensor_parallel import apply_tensor_parallelism, row_wise_parts
from tests.helpers.effort import examples, one_in
from tests.helpers.plans import random_plan
from tests.helpers.ranks import run_mesh
from tests.helpers.steps import (
    Batch,
    StepOutcome,
    make_model,
    random_batch,
    reference_step,
    slice_batch,
    small_shape,
    worst_relative_error,
)
from tests.runtime.test_moe_parity import reference as mixture_reference

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
MIXTURE = {"num_experts": 4, "experts_per_token": 2, "router_aux_loss_weight": 0.5, "init_std": 0.2}
MESHES = [
    MeshShape(pp=pp, hdp=hdp, tp=tp) for pp in (1, 2, 4) for hdp in (1, 2, 4) for tp in (1, 2, 4) if pp * hdp * tp <= 8
]


def mesh_shape(**changes: object) -> Architecture:
    numbers = {"num_layers": 4, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 64}
    return small_shape(**{**numbers, "ffn_hidden_size": 32, **changes})


def part_of(mesh: Mesh, shape: Architecture, dtype: torch.dtype) -> tuple[Llama, dict[str, Cut]]:
    """This rank's layers, cut for its TP rank, with the values of the whole model."""
    whole = {name: value.detach() for name, value in make_model(shape, dtype).named_parameters()}
    if shape.tie_embeddings:
        whole["lm_head.weight"] = whole["embed_tokens.weight"]
    model = build_model(shape, split_layers(shape, mesh.shape.pp)[mesh.stage]).to(dtype)
    if mesh.tp.size > 1:
        cuts = apply_tensor_parallelism(model, TokenShards(mesh.tp))
    else:
        cuts = {name: Cut(shape=tuple(value.shape)) for name, value in model.named_parameters()}
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(cuts[name].of(whole[name]))
    return model, cuts


def mesh_step(
    mesh_shape: MeshShape,
    shape: Architecture,
    dtype: torch.dtype,
    batch: Batch,
    plan: Plan,
    *,
    checkpointing: str = "none",
    offload: bool = False,
    head_groups: int = 1,
    compiler: RowCompiler | None = None,
) -> StepOutcome:
    """One step on a mesh of threads; gradients put together from all parts. ``compiler``: of pointwise parts."""

    def one_rank(mesh: Mesh):
        model, cuts = part_of(mesh, shape, dtype)
        kernel = select_kernel("auto", torch.device("cpu"), dtype)
        if compiler is not None:
            apply_compiled(model, compiler)
        for layer in model.layers:
            apply_head_groups(layer.self_attn, head_groups)
        flat = FlatParameters(model.named_parameters(), 1, cuts)
        rank_plan = RankPlan.of(plan, mesh.hdp.rank)
        pool = HostPool(2**24, pinned=False) if offload else None
        activations = Activations(
            list(model.layers),
            checkpointing=checkpointing,  # type: ignore[arg-type]
            pool=pool,
            tp=mesh.tp,
            row_wise=row_wise_parts(model, mesh.tp.size),
            chunk_rows=8,
        )
        result = Executor(part=Decoder(module=model, activations=activations), kernel=kernel, mesh=mesh).run(
            rank_plan,
            [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches],
            num_global_targets=batch.num_targets,
        )
        sum_replicas(flat, mesh.tp)
        gradients = {entry.name: (entry.cut, flat.gradient_of(entry)) for entry in flat.entries}
        return mesh.hdp.rank, result, gradients

    outcomes = run_mesh(mesh_shape, one_rank)
    loss = sum(result.loss_sum for _, result, _ in outcomes) / batch.num_targets
    # Every stage's ranks know their layers' share of the balance loss.
    balance = sum(result.batch_loss for _, result, _ in outcomes) / (mesh_shape.hdp * mesh_shape.tp)
    assert sum(result.num_targets for _, result, _ in outcomes) == batch.num_targets
    return StepOutcome(
        loss, put_together([gradients for _, _, gradients in outcomes], shape.tie_embeddings), [], balance
    )


def put_together(ranks: Sequence[dict[str, tuple[Cut, Tensor]]], tied: bool) -> dict[str, Tensor]:
    """Whole gradients: summed over HDP ranks and uses, parts in their places, replicas counted once."""
    whole: dict[str, Tensor] = {}
    for gradients in ranks:
        for name, (cut, gradient) in gradients.items():
            home = "embed_tokens.weight" if tied and name == "lm_head.weight" else name
            total = whole.setdefault(home, gradient.new_zeros(cut.shape))
            if cut.replica == 0:
                cut.of(total).add_(gradient)
    return whole


def assert_parity(
    mesh: MeshShape, plan: Plan, lengths: list[int], dtype: torch.dtype, *, seed: int = 0, **options: object
) -> None:
    of_the_run = ("checkpointing", "offload", "head_groups")
    run_options = {key: options.pop(key) for key in of_the_run if key in options}
    shape = mesh_shape(**options)
    real_weights = seed % 2 == 1 and not shape.num_experts
    batch = random_batch(lengths, shape.vocab_size, seed, real_weights=real_weights)
    if batch.num_targets == 0:
        batch.labels[0][0] = 1
    ours = mesh_step(mesh, shape, dtype, batch, plan, **run_options)  # type: ignore[arg-type]
    if shape.num_experts:
        loss, balance, gradients = mixture_reference(shape, dtype, batch)
        assert ours.batch_loss == pytest.approx(balance, rel=TOLERANCE[dtype])
    else:
        reference = reference_step(make_model(shape, dtype), batch)
        loss, gradients = reference.loss, reference.gradients
    assert ours.loss == pytest.approx(loss, rel=TOLERANCE[dtype], abs=TOLERANCE[dtype])
    assert worst_relative_error(ours.gradients, gradients) <= TOLERANCE[dtype]


def runnable_plan(lengths: list[int], mesh: MeshShape, seed: int) -> Plan:
    """A random plan, of some seeds with weights; with stages one that the check for deadlock accepts."""
    plan = random_plan(lengths, mesh.hdp, seed, weighted=seed % 3 == 0)
    if mesh.pp > 1:
        cluster = Cluster.uniform(mesh.hdp, int(np.sum(lengths)))
        plan = align(plan, cluster=cluster, cost=CostModel.from_work(linear_per_square=40))
        verify(plan, num_stages=mesh.pp)
    return plan


@pytest.mark.parametrize(
    ("mesh", "family"), one_in(7, [(mesh, family) for mesh in MESHES for family in ("llama", "mixtral")])
)
def test_every_mesh_gives_the_loss_and_gradients_of_one_process(mesh: MeshShape, family: str) -> None:
    experts = MIXTURE if family == "mixtral" else {}
    lengths = [33, 5, 18, 1, 9, 27, 2]
    plan = runnable_plan(lengths, mesh, seed=mesh.size)
    assert_parity(mesh, plan, lengths, torch.float64, **experts)


@examples(4, 40, suppress_health_check=[HealthCheck.too_slow])
@given(
    mesh=st.sampled_from(MESHES),
    family=st.sampled_from(["llama", "mixtral"]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    seed=st.integers(0, 10_000),
    heads=st.sampled_from([(4, 2), (4, 4), (8, 1)]),
    tied=st.booleans(),
    checkpointing=st.sampled_from(["none", "full", "attention"]),
    ratio=st.sampled_from([0.0, 0.4, 1.0]),
    grouped=st.booleans(),
)
@example(  # rows that no tensor-parallel rank can share evenly, and ranks without any
    mesh=MeshShape(pp=2, hdp=1, tp=4),
    family="mixtral",
    dtype=torch.float64,
    lengths=[1, 2, 3],
    seed=1,
    heads=(4, 2),
    tied=True,
    checkpointing="full",
    ratio=1.0,
    grouped=True,
)
def test_any_mesh_any_plan(
    mesh: MeshShape,
    family: str,
    dtype: torch.dtype,
    lengths: list[int],
    seed: int,
    heads: tuple[int, int],
    tied: bool,
    checkpointing: str,
    ratio: float,
    grouped: bool,
) -> None:
    experts = MIXTURE if family == "mixtral" else {}
    plan = runnable_plan(lengths, mesh, seed)
    plan = replace(plan, group_offload_ratio=np.full(plan.num_groups, ratio))
    assert_parity(
        mesh,
        plan,
        lengths,
        dtype,
        seed=seed,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        tie_embeddings=tied,
        num_layers=5,
        checkpointing=checkpointing,
        offload=ratio > 0,
        head_groups=max(1, heads[1] // mesh.tp) if grouped else 1,
        **experts,
    )


@examples(2, 15)
@given(
    planner=st.sampled_from(["naive", "paper", "greedy", "adaptive"]),
    mesh=st.sampled_from([MeshShape(pp=2, hdp=4), MeshShape(pp=4, hdp=2), MeshShape(pp=2, hdp=2, tp=2)]),
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=16),
    slack=st.integers(0, 8),
)
def test_plans_of_every_planner_run_through_a_pipeline(
    planner: str, mesh: MeshShape, lengths: list[int], slack: int
) -> None:
    """Small capacities: pipelines get different numbers of micro-batches, and shared groups between them."""
    config = PlannerConfig(name=planner)  # type: ignore[arg-type]
    cluster = Cluster.uniform(mesh.hdp, -(-max(lengths) // mesh.hdp) + slack)
    plan = make_planner(config, cluster, CostModel.from_work(linear_per_square=40), num_stages=mesh.pp)(lengths)
    verify(plan, num_stages=mesh.pp)
    assert_parity(mesh, plan, lengths, torch.float64, seed=slack)


def test_sends_are_let_go_while_the_step_runs() -> None:
    """Of 40 micro-batches a stage holds no more messages than are in flight under 1F1B."""
    plan = Plan.build(
        lengths=[8] * 40,
        capacity_tokens=[8],
        groups=[GroupSpec(sequences=[n], ranks=[0]) for n in range(40)],
        schedule=[[[n] for n in range(40)]],
    )
    held: list[int] = []
    remember = StageLinks.exchange

    def counting(self: StageLinks, place: int, made: Tensor | None = None) -> None:
        remember(self, place, made)
        if made is not None:
            held.append(len(self._sent))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageLinks, "exchange", counting)
        assert_parity(MeshShape(pp=4, hdp=1), plan, [8] * 40, torch.float64)
    assert len(held) == 40 * 6  # three stages send forward, three backward
    assert max(held) <= 8


def test_ranks_are_ordered_stage_then_hdp_then_tensor_parallel() -> None:
    """docs/architecture.md: 2 stages x 3 HDP x 2 TP."""
    shape = MeshShape(pp=2, hdp=3, tp=2)
    places = {shape.coordinates(rank): rank for rank in range(shape.size)}
    assert len(places) == shape.size
    assert all(shape.rank(*place) == rank for place, rank in places.items())
    assert (places[0, 1, 0], places[0, 1, 1], places[1, 1, 0], places[1, 1, 1]) == (2, 3, 8, 9)
