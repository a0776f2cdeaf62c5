"""One step of our own models on a mesh of threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bytescale.attention import select_kernel
from bytescale.common.cut import Cut
from bytescale.config import Architecture
from bytescale.cost.split import split_layers
from bytescale.models import Llama, build_model
from bytescale.models.compiled import RowCompiler, apply_compiled
from bytescale.models.head_groups import apply_head_groups
from bytescale.plan import Plan, RankPlan
from bytescale.runtime import Decoder, Executor, FlatParameters, HostPool, Mesh, MeshShape, TokenShards
from bytescale.runtime.optimizer.zero import sum_replicas
from bytescale.runtime.saved.activations import Activations
from bytescale.train.parts.tensor_parallel import apply_tensor_parallelism, row_wise_parts
from tests.helpers.ranks import run_mesh
from tests.helpers.steps import (
    Batch,
    StepOutcome,
    slice_batch,
)
from tests.models.own import make_model, small_shape

MIXTURE = {"num_experts": 4, "experts_per_token": 2, "router_aux_loss_weight": 0.5, "init_std": 0.2}


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
