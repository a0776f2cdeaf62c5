"""Whole training steps of a small model, for the recorder: every plan, mesh and mode that the runtime knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from bytescale.attention import AttentionRules, PackedAttention
from bytescale.config.schema import OptimizerConfig
from bytescale.cost.profile import split_costs
from bytescale.hf.model import stages, tensor_parallel
from bytescale.parity import small_model
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.executor import Decoder, Executor
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.buckets import Chunk
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.saved.activations import Activations
from tests.helpers.decoder import PlainDecoder, Sizes, rotation_of
from tests.helpers.rules import apply_recurrence, apply_rules
from tests.helpers.steps import random_batch, slice_batch
from tests.hf.mesh_steps import rank_model
from tests.nccl.recorder import RecordedGroup, ZeroKernel

NUM_WORDS = 68


class Stage(nn.Module):
    """A pipeline stage of a plain decoder: what ranks post depends on the plan, the mesh and the number of layers."""

    def __init__(self, model: PlainDecoder, number: int, count: int) -> None:
        super().__init__()
        own = split_costs([1.0] * len(model.layers), 0.0, count)[number]
        self.layers = model.layers[own.start : own.stop]
        self.embed_tokens = model.embed_tokens if number == 0 else None
        self.norm, self.lm_head = (model.norm, model.lm_head) if number == count - 1 else (None, None)
        self.hidden_size, self.head_dim = model.hidden_size, model.head_dim

    def forward(self, inputs: Tensor, position_ids: Tensor, attention: PackedAttention) -> Tensor:
        hidden = inputs if self.embed_tokens is None else self.embed_tokens(inputs)
        rotation = rotation_of(position_ids, self.head_dim, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotation, attention)
        return hidden if self.norm is None else self.norm(hidden)

    @property
    def head_weight(self) -> Tensor:
        owner = self.lm_head or self.embed_tokens
        assert owner is not None, "it is the last stage"
        return owner.weight


def training_step(
    plan: Plan,
    num_layers: int,
    *,
    family: str = "",
    tied: bool = False,
    checkpointing: str = "none",
    bucket_bytes: int = 0,
    window: int | None = None,
    recurrence: str = "",
    on_host: bool = False,
    indexer_loss: str = "",
    optimizer_name: str = "adamw",
    begun: Callable[[Mesh, ShardedOptimizer], object] = lambda mesh, optimizer: None,
) -> Callable[[Mesh], None]:
    """What one rank does in one step, all its collectives included.

    ``family``: of transformers; empty: the plain decoder, and one of transformers where ranks share matrices.
    ``bucket_bytes``: of gradients that are reduced while ranks compute. Then there are two steps, since parameters are
    gathered during the second one's forwards. ``window``: of every second layer's attention. ``recurrence``:
    ``matrix`` or ``number``, how states decay in every other layer. ``on_host``: whether the optimizer is in host
    memory. ``indexer_loss``: ``dense`` or ``sparse``, by which indexers are trained. ``begun``: called first.
    """
    batch = random_batch(plan.lengths.tolist(), NUM_WORDS, 0, masked_share=0.0)

    def plain(mesh: Mesh) -> tuple[FlatParameters, Chunk, Executor]:
        sizes = Sizes(num_layers=num_layers, hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=2)
        sizes = replace(sizes, ffn_hidden_size=8, vocab_size=NUM_WORDS, tie_embeddings=tied)
        module = Stage(PlainDecoder(sizes), mesh.stage, mesh.shape.pp)
        for number, layer in enumerate(module.layers):
            if number % 2:
                apply_rules(layer.self_attn, AttentionRules(window=window))
            elif recurrence:
                apply_recurrence(layer.self_attn, matrix=recurrence == "matrix")
        parameters = FlatParameters(module.named_parameters(), mesh.hdp.size, bucket_bytes=bucket_bytes)
        activations = Activations(list(module.layers), checkpointing=checkpointing)  # type: ignore[arg-type]
        part = Decoder(module=module, activations=activations)
        return parameters, (module, list(module.layers)), Executor(part=part, kernel=ZeroKernel(), mesh=mesh)

    def step(mesh: Mesh) -> None:
        mesh.connect()
        if family or mesh.tp.size > 1:
            assert not recurrence, "those are the plain decoder's"
            shape = {"num_hidden_layers": num_layers, "vocab_size": NUM_WORDS, "tie_word_embeddings": tied}
            windows = {} if window is None else {"sliding_window": window, "sliding_window_pattern": 2}
            name = family or ("llama" if window is None else "gemma3_text")
            if family == "deepseek_v32":  # what arrives is no number, and experts would not be chosen alike again
                shape["first_k_dense_replace"] = num_layers
            with as_if_equal(mesh):
                model = small_model(name, dtype=torch.float32, **shape, **windows)
                for key, parameter in model.named_parameters():
                    parameter.requires_grad_(indexer_loss != "dense" or ".indexer." in key)
                learned = (indexer_loss, 1.0) if indexer_loss else None
                own = rank_model(model, mesh, bucket_bytes=bucket_bytes, indexer_loss=learned)
            parameters, layers, more, units = own.parameters, own.layers, own.more, own.units
            executor = own.executor(mesh, ZeroKernel(), checkpointing=checkpointing)
        else:
            parameters, layers, executor = plain(mesh)
            more, units = (), None
        config = OptimizerConfig(name=optimizer_name, offload=on_host)  # type: ignore[arg-type]
        optimizer = ShardedOptimizer.of_config(parameters, config, mesh, more=more, units=units)
        if bucket_bytes:
            optimizer.zeros[0].overlap_with(layers)
        begun(mesh, optimizer)
        rank_plan = RankPlan.of(plan, mesh.hdp.rank)
        for _ in range(2 if bucket_bytes else 1):
            mesh.world.agree("the plan", rank_plan.digest)
            optimizer.begin_step(rank_plan)
            executor.run(
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


@contextmanager
def as_if_equal(mesh: Mesh) -> Iterator[None]:
    """Cutting a model compares it with itself, which needs numbers of other ranks. Its messages are left out."""
    same = patch.object(tensor_parallel, "difference", lambda *_: None)
    with same, patch.object(stages, "_require_equal", lambda *_: None), _disable_current_modes():
        yield
    group = mesh.world.group
    assert isinstance(group, RecordedGroup)
    group.log.events.clear()


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
