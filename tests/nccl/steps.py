"""Whole training steps of a small model, for the recorder: every plan, mesh and mode that the runtime knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from bytescale.models.head_groups import apply_head_groups
from bytescale.train.parts.own_model import build_own_model

from bytescale.attention import AttentionRules
from bytescale.config.architecture import Architecture
from bytescale.config.schema import OptimizerConfig
from bytescale.hf.model.measure import row_wise_parts
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.executor import Decoder, Executor
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.saved.activations import Activations
from tests.helpers.rules import apply_recurrence, apply_rules
from tests.helpers.steps import random_batch, slice_batch, small_shape
from tests.nccl.recorder import ZeroKernel


def tiny(num_layers: int, **changes: object) -> Architecture:
    """A model that costs next to nothing: what it posts depends on the plan, the mesh and the number of layers."""
    numbers = {"num_layers": num_layers, "hidden_size": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2}
    return small_shape(**{**numbers, "ffn_hidden_size": 8, "vocab_size": 16, **changes})


def training_step(
    plan: Plan,
    architecture: Architecture,
    *,
    checkpointing: str = "none",
    head_groups: int = 1,
    bucket_bytes: int = 0,
    window: int | None = None,
    recurrence: str = "",
    on_host: bool = False,
) -> Callable[[Mesh], None]:
    """What one rank does in one step, all its collectives included.

    ``bucket_bytes``: of gradients that are reduced while ranks compute. Then there are two steps, since parameters are
    gathered during the second one's forwards. ``window``: of every second layer's attention. ``recurrence``:
    ``matrix`` or ``number``, how states decay in every other layer. ``on_host``: whether the optimizer is in host
    memory.
    """
    batch = random_batch(plan.lengths.tolist(), architecture.vocab_size, 0, masked_share=0.0)

    def step(mesh: Mesh) -> None:
        mesh.connect()
        own = build_own_model(architecture, mesh, dtype=torch.float32, seed=0, bucket_bytes=bucket_bytes)
        optimizer = ShardedOptimizer.of_config(
            own.parameters, OptimizerConfig(offload=on_host), mesh, more=own.more, units=own.units
        )
        if bucket_bytes:
            optimizer.zeros[0].overlap_with(own.layers)
        rank_plan = RankPlan.of(plan, mesh.hdp.rank)
        for number, layer in enumerate(own.module.layers):
            apply_head_groups(layer.self_attn, head_groups)
            if number % 2:
                apply_rules(layer.self_attn, AttentionRules(window=window))
            elif recurrence:
                apply_recurrence(layer.self_attn, matrix=recurrence == "matrix")
        activations = Activations(
            list(own.module.layers),
            checkpointing=checkpointing,  # type: ignore[arg-type]
            tp=mesh.tp,
            row_wise=row_wise_parts(own.module, mesh.tp.size),
            chunk_rows=8,
        )
        part = Decoder(module=own.module, activations=activations)
        for _ in range(2 if bucket_bytes else 1):
            mesh.world.agree("the plan", rank_plan.digest)
            optimizer.begin_step(rank_plan)
            Executor(part=part, kernel=ZeroKernel(), mesh=mesh, units=own.units).run(
                rank_plan,
                [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches],
                num_global_targets=batch.num_targets,
                after_last_message=optimizer.after_last_message,
            )
            norm = optimizer.reduce_gradients()
            mesh.world.sum_of([norm])
            mesh.world.max_of([norm])
            optimizer.update(1.0, 1.0, 1e-3)
        optimizer.wait_for_parameters()

    return step


def uneven(counts: Sequence[int], lengths: Sequence[int]) -> Plan:
    """Rank r runs ``counts[r]`` micro-batches; all ranks share those at an index that all have, the rest are local."""
    shared = min(counts)
    groups = [GroupSpec(sequences=[n], ranks=list(range(len(counts)))) for n in range(shared)]
    schedule: list[list[list[int]]] = [[[n] for n in range(shared)] for _ in counts]
    for rank, count in enumerate(counts):
        for _ in range(count - shared):
            schedule[rank].append([len(groups)])
            groups.append(GroupSpec(sequences=[len(groups)], ranks=[rank]))
    sizes = [lengths[n % len(lengths)] for n in range(len(groups))]
    return Plan.build(lengths=sizes, capacity_tokens=[max(sizes)] * len(counts), groups=groups, schedule=schedule)
