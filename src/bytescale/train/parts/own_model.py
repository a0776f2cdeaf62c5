"""One rank's part of the model: its stage's layers, cut for its tensor-parallel rank, in flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from bytescale.checkpoint.initial_weights import load_initial_weights
from bytescale.common.cut import Cut
from bytescale.config.architecture import Architecture
from bytescale.config.schema import Config, Experts
from bytescale.cost.memory.device_kernels import DeviceKind
from bytescale.cost.spec import ModelSpec
from bytescale.cost.split import split_layers
from bytescale.models import Llama, build_model, moe
from bytescale.models.compiled import apply_compiled
from bytescale.models.head_groups import apply_head_groups
from bytescale.models.initial_values import initial_values
from bytescale.runtime.executor import Decoder, HasBatchLoss
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.buckets import Chunk
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.lockstep import Units, shard_parts
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.token_shards import TokenShards
from bytescale.train.parts.budget import MemoryBudget
from bytescale.train.parts.run_kernels import Kernels
from bytescale.train.parts.tensor_parallel import apply_tensor_parallelism, row_wise_parts
from bytescale.train.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """One rank's part of the model."""

    architecture: Architecture  # of the whole model
    module: Llama  # the stage's layers, on its tensor-parallel rank
    parameters: FlatParameters  # in flat buffers
    more: Sequence[FlatParameters]  # further ones, where ranks share layers
    units: Units | None  # open these layers

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec.of(self.architecture)

    @property
    def layers(self) -> Chunk:
        return self.module, list(self.module.layers)

    def memory(self, kind: DeviceKind, num_ranks: int, ranks: Ranks | None = None) -> Architecture:
        """What ``budget.memory_budget`` is to count the memory of."""
        return self.architecture

    def load(self, config: Config, optimizer: ShardedOptimizer, ranks: Ranks) -> None:
        if config.trainer.init:
            load_initial_weights(config.trainer.init, self.architecture, optimizer, ranks.checkpoint_group)

    def tied(self, optimizer: ShardedOptimizer, mesh: Mesh) -> None:
        """A tied embedding is on one stage alone (``config.validate``)."""

    def decoder(self, config: Config, ranks: Ranks, kernels: Kernels, memory: MemoryBudget) -> Decoder:
        """Apply kernels, head groups, checkpointing and offloading to the model."""
        module, tp = self.module, ranks.mesh.tp
        if kernels.compiler is not None:
            apply_compiled(module, kernels.compiler)
        for layer in module.layers:
            apply_head_groups(layer.self_attn, memory.model.head_groups)
        activations = Activations(
            list(module.layers),
            checkpointing=config.memory.checkpointing,
            pool=memory.host_pool(ranks.device),
            device=ranks.device,
            tp=tp,
            # Experts in parallel send all rows at once: every rank of the domain has other chunks.
            row_wise=[] if self.units is not None and self.units.mixtures else row_wise_parts(module, tp.size),
        )
        return Decoder(module=module, activations=activations)


def build_own_model(
    architecture: Architecture,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    seed: int,
    bucket_bytes: int = 0,
    experts: Experts = "gathered",
) -> OwnModel:
    """Make this rank's part and nothing else of the model, with the initial values that belong to ``seed``.

    ``bucket_bytes``: of gradients that are reduced at once; 0: all of them. ``experts``: see ``parallel.experts``.
    """
    # 1. Layers of this stage, without memory, cut for this rank, then made.
    with torch.device("meta"):
        module = build_model(architecture, split_layers(architecture, mesh.shape.pp)[mesh.stage])
        if mesh.tp.size > 1:
            cuts = apply_tensor_parallelism(module, TokenShards(mesh.tp))
        else:
            cuts = {name: Cut(shape=tuple(p.shape)) for name, p in module.named_parameters()}
    module.to(dtype)._apply(partial(_without_memory, mesh.world.device))

    # 2. Flat buffers; ranks of a domain share most of them.
    own = list(module.named_parameters())
    at_the_end = set(map(id, module.batch_parameters() if isinstance(module, HasBatchLoss) else ()))
    late = {name for name, parameter in own if id(parameter) in at_the_end}
    more, units = list[FlatParameters](), None
    if mesh.domain.size > 1:  # without a pipeline, so it is the whole model
        own, sharing, units = shard_parts(
            own,
            _parts(module),
            mesh,
            late=late,
            cuts=cuts,
            initial=lambda entry: initial_values(entry.name, entry.cut, architecture, seed),
            experts=[own for own in module.modules() if isinstance(own, moe.Experts)] if experts == "parallel" else (),
        )
        more += sharing
    parameters = FlatParameters(own, mesh.hdp.size, cuts, bucket_bytes=bucket_bytes, late=late)

    # 3. Initial values of this rank's parameters.
    for entry in parameters.entries:
        parameters.value_of(entry).copy_(initial_values(entry.name, entry.cut, architecture, seed))
    return OwnModel(architecture=architecture, module=module, parameters=parameters, more=more, units=units)


def _parts(model: Llama) -> list[nn.Module]:
    """Embedding, layers and head of a whole model (``lockstep.Units``)."""
    assert model.embed_tokens is not None, "the first stage has the embedding"
    return [model.embed_tokens, *model.layers, model.lm_head or nn.ParameterList([model.embed_tokens.weight])]


def _without_memory(device: torch.device, parameter: Tensor) -> Tensor:
    """Of the same shape and dtype: the memory comes with the flat buffers."""
    return torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)
