"""One rank's part of the model: its stage's layers, cut for its tensor-parallel rank, in flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from bytescale.checkpoint.initial_weights import load_initial_weights
from bytescale.common.cut import Cut
from bytescale.config import Architecture, Config
from bytescale.cost.memory import DeviceKind
from bytescale.cost.spec import ModelSpec
from bytescale.cost.split import stage_chunks
from bytescale.models import Llama, build_model
from bytescale.models.compiled import apply_compiled
from bytescale.models.head_groups import apply_head_groups
from bytescale.models.initial_values import initial_values
from bytescale.models.tensor_parallel import apply_tensor_parallelism, row_wise_parts
from bytescale.runtime import (
    Activations,
    Decoder,
    FlatParameters,
    HasBatchLoss,
    Mesh,
    ShardedOptimizer,
    TiedHead,
    TokenShards,
)
from bytescale.runtime.optimizer.buckets import Chunk
from bytescale.runtime.optimizer.lockstep import Units, shard_parts
from bytescale.train.parts.budget import MemoryBudget
from bytescale.train.parts.run_kernels import Kernels
from bytescale.train.ranks import Ranks

_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """One rank's part of the model."""

    architecture: Architecture  # of the whole model
    chunks: Sequence[Llama]  # of layers; several where stages are interleaved
    parameters: FlatParameters  # of all chunks, in flat buffers
    more: Sequence[FlatParameters]  # further ones, where ranks share layers
    units: Units | None  # open these layers
    tied_head: TiedHead | None  # where the embedding is the head too, and another stage's rank has one of the two

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec.of(self.architecture)

    @property
    def layers(self) -> list[Chunk]:
        return [(chunk, list(chunk.layers)) for chunk in self.chunks]

    def memory(self, kind: DeviceKind, num_ranks: int) -> Architecture:
        """What ``budget.memory_budget`` is to count the memory of."""
        return self.architecture

    def load(self, config: Config, optimizer: ShardedOptimizer, ranks: Ranks) -> None:
        if config.trainer.init:
            load_initial_weights(config.trainer.init, self.architecture, optimizer, ranks.checkpoint_group)

    def decoders(self, config: Config, ranks: Ranks, kernels: Kernels, memory: MemoryBudget) -> list[Decoder]:
        """Apply kernels, head groups, checkpointing and offloading to the model."""
        checkpointing, tp, pool = config.memory.checkpointing, ranks.mesh.tp, memory.host_pool(ranks.device)
        parts = []
        for chunk in self.chunks:
            if kernels.compiler is not None:
                apply_compiled(chunk, kernels.compiler)
            for layer in chunk.layers:
                apply_head_groups(layer.self_attn, memory.model.head_groups)
            activations = Activations(
                list(chunk.layers),
                checkpointing=checkpointing,
                pool=pool,
                device=ranks.device,
                tp=tp,
                row_wise=row_wise_parts(chunk, tp.size),
            )
            parts.append(Decoder(module=chunk, activations=activations))
        return parts


def build_own_model(
    architecture: Architecture,
    mesh: Mesh,
    *,
    virtual_stages: int,
    dtype: torch.dtype,
    seed: int,
    bucket_bytes: int = 0,
) -> OwnModel:
    """Make this rank's part and nothing else of the model, with the initial values that belong to ``seed``.

    ``bucket_bytes``: of gradients that are reduced at once; 0: all of them.
    """
    # 1. Layers of this stage, without memory, cut for this rank, then made.
    ranges = stage_chunks(architecture, mesh.shape.pp, mesh.stage, virtual_stages)
    chunks: list[Llama] = []
    cuts: dict[str, Cut] = {}
    for layers in ranges:
        with torch.device("meta"):
            chunk = build_model(architecture, layers)
            if mesh.tp.size > 1:
                cuts.update(apply_tensor_parallelism(chunk, TokenShards(mesh.tp)))
            else:
                cuts.update({name: Cut(shape=tuple(p.shape)) for name, p in chunk.named_parameters()})
        chunk.to(dtype)._apply(partial(_without_memory, mesh.world.device))
        chunks.append(chunk)

    # 2. Flat buffers; ranks of a domain share most of them. A borrowed head is not in them: the first stage keeps it
    #    up to date.
    named = [item for chunk in chunks for item in chunk.named_parameters()]
    borrows = architecture.tie_embeddings and mesh.shape.pp > 1
    borrowed = [(name, parameter) for name, parameter in named if borrows and name == _HEAD]
    own = [(name, parameter) for name, parameter in named if not (borrows and name == _HEAD)]
    at_the_end = {id(p) for chunk in chunks if isinstance(chunk, HasBatchLoss) for p in chunk.batch_parameters()}
    late = {name for name, parameter in own if id(parameter) in at_the_end or (borrows and name == _EMBEDDING)}
    more, units = list[FlatParameters](), None
    if mesh.domain.size > 1:  # without a pipeline, so there is one chunk
        own, sharing, units = shard_parts(
            own,
            _parts(chunks[0]),
            mesh,
            late=late,
            cuts=cuts,
            initial=lambda entry: initial_values(entry.name, entry.cut, architecture, seed),
        )
        more += sharing
    parameters = FlatParameters(own, mesh.hdp.size, cuts, bucket_bytes=bucket_bytes, late=late)
    lent = FlatParameters(borrowed, 1, cuts) if borrowed else parameters
    shared = [entry for entry in lent.entries if borrows and entry.name in (_HEAD, _EMBEDDING)]
    tied_head = TiedHead(mesh, lent.value_of(shared[0]), lent.gradient_of(shared[0])) if shared else None

    # 3. Initial values of this rank's parameters.
    for entry in parameters.entries:
        parameters.value_of(entry).copy_(initial_values(entry.name, entry.cut, architecture, seed))
    if tied_head is not None:
        tied_head.lend()
    return OwnModel(
        architecture=architecture, chunks=chunks, parameters=parameters, more=more, units=units, tied_head=tied_head
    )


def _parts(model: Llama) -> list[nn.Module]:
    """Embedding, layers and head of a whole model (``lockstep.Units``)."""
    assert model.embed_tokens is not None, "the first stage has the embedding"
    return [model.embed_tokens, *model.layers, model.lm_head or nn.ParameterList([model.embed_tokens.weight])]


def _without_memory(device: torch.device, parameter: Tensor) -> Tensor:
    """Of the same shape and dtype: the memory comes with the flat buffers."""
    return torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)
