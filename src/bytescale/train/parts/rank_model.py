"""A decoder of transformers in the trainer: on our attention, in flat buffers, with its memory measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bytescale.attention import AttentionKernel
from bytescale.attention.kernels import CudaFlashKernel
from bytescale.checkpoint.reading import load_states
from bytescale.common.errors import ConfigError
from bytescale.config.description import ModelDescription
from bytescale.config.resolve import CHECKPOINT_PREFIX, HF_PREFIX, source_folder
from bytescale.config.schema import Config
from bytescale.cost.gradient_sync import BUCKET_BYTES
from bytescale.cost.memory.device_kernels import DeviceKind
from bytescale.cost.memory.measured import MeasuredMemory, MeasuredRows
from bytescale.cost.spec import ModelSpec
from bytescale.hf.files.folder import constants_of, empty_model, load_model, make_model, set_constants, train_a_part
from bytescale.hf.files.hf_folder import exact_dtype
from bytescale.hf.model.balance import BalanceLoss
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.measure import measure_rows, measured_memory, of_all_stages
from bytescale.hf.model.parallelize import RankPart, parallelize
from bytescale.hf.model.probe import check_widths
from bytescale.runtime.executor import Decoder
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.buckets import Chunk
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.lockstep import Units, shard_parts
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.tied import TiedHead
from bytescale.runtime.usable import kind_of
from bytescale.train.parts.activations import activations_of
from bytescale.train.parts.large_model import Initial, part_of_large, shapes_of, values_in
from bytescale.train.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """One rank's model on our attention, with its parameters in flat buffers."""

    architecture: ModelDescription  # with the constants that belong to the weights
    part: HFDecoder
    parameters: FlatParameters
    activations: Activations
    rows: MeasuredRows  # the memory that a token was seen to need
    planned: tuple[int, float]  # tensor-parallel parts that are planned, and the share of the weights of one of them
    initial: Initial | None  # the weights in full precision; None: the parameters have them
    more: Sequence[FlatParameters] = ()  # further ones, where ranks share layers
    units: Units | None = None  # open these layers

    @property
    def spec(self) -> ModelSpec:
        return self.part.spec

    @property
    def layers(self) -> Chunk:
        return self.part, self.part.layers

    def memory(self, kind: DeviceKind, num_ranks: int, ranks: Ranks | None = None) -> MeasuredMemory:
        """What a micro-batch needs on one of ``num_ranks`` devices of a ``kind``, by the measured rows.

        Of all stages, where ``ranks`` are a pipeline.
        """
        own, (parts, share) = measured_memory(self.part, self.rows, kind=kind, num_ranks=num_ranks), self.planned
        own = own.of_part(parts, share) if parts > 1 else own
        return own if ranks is None else of_all_stages(own, ranks.mesh)

    def load(self, config: Config, optimizer: ShardedOptimizer, ranks: Ranks) -> None:
        """Give the optimizer the initial weights in full precision, and all ranks its parameters."""
        if config.trainer.init.startswith(CHECKPOINT_PREFIX):
            place = config.trainer.init.removeprefix(CHECKPOINT_PREFIX)
            load_states(place, optimizer, self.architecture.as_dict(), ranks.checkpoint_group, only=["master"])
        elif self.initial is not None:
            for zero in optimizer.zeros:
                for shard, own in zip(zero.shards, zero.parameters.shards(ranks.mesh.hdp.rank), strict=True):
                    for piece in zero.parameters.pieces(own):
                        inside = piece.inside(slice(piece.entry.start, piece.entry.stop))
                        shard.master[piece.inside(own)] = self.initial(piece.entry.name, piece.entry.cut, inside)
        else:
            return
        optimizer.finish_restore(0, {})

    def decoder(self, optimizer: ShardedOptimizer, mesh: Mesh) -> Decoder:
        part = self.part
        return Decoder(
            module=part,
            activations=self.activations,
            head=part.head,
            splits_loss=part.splits_loss,
            batch_loss=part.balance or part.indexer_loss,
            tied=TiedHead.of(mesh, None if part.stage is None else part.stage.tied, optimizer.zeros),
        )


def build_rank_model(
    config: Config,
    architecture: ModelDescription,
    kernel: AttentionKernel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    smallest: Callable[[Sequence[float]], Sequence[float]] = list,
    mesh: Mesh | None = None,
    kind: DeviceKind | None = None,
    num_shards: int = 1,
    stage: tuple[int, int] | None = None,
    planned_parts: int = 1,
) -> RankModel:
    """Load or make the model, attach it, move its parameters into flat memory and measure its layers.

    ``smallest``: the minimum over ranks of each of these numbers. All ranks go by the rank whose kernels keep most.
    ``mesh``: of the ranks; None: one rank builds it to look at it: for devices of a ``kind`` (None: that of
    ``device``), as one of ``num_shards`` HDP ranks, at a ``stage`` of a pipeline of so many, and at one of the
    ``planned_parts`` of tensor parallelism.

    Raises ``ConfigError`` if the model cannot be attached, or has no weights that can be read; ``CheckpointError`` if
    weights are missing, have other shapes or no place.
    """
    initial: Initial | None = None
    rows: MeasuredRows | None = None
    shapes = None
    if mesh is not None:
        num_shards = mesh.hdp.size
        shapes = None if config.trainer.invariant else shapes_of(architecture, dtype, config.data.context_length)
    if mesh is not None and shapes is not None:
        made = part_of_large(config, architecture, shapes, mesh, device=device, dtype=dtype)
        architecture, part, own, rows, initial = made
    else:
        architecture, part, exact = _whole_model(config, architecture, mesh, device=device, dtype=dtype)
        initial = values_in(exact) if exact else None
        own = parallelize(part, mesh, stage=stage, planned_parts=planned_parts)
    check_widths(part.structure, cuda_flash=isinstance(kernel, CudaFlashKernel))

    # Flat buffers, in the order in which the model names its parameters.
    like = torch.empty(0, dtype=dtype, device=device)
    flat, units = _flat_buffers(config, part, own, mesh, num_shards, like)
    activations = activations_of(config, part, device, kind or kind_of(device), mesh)
    if rows is None:
        rows = measure_rows(part, kernel, activations, device)
        for parameters in flat:
            parameters.zero_gradients()
    elif activations.offload is not None:
        activations.offload.pool.token_bytes = rows.moved_per_token
    return RankModel(
        architecture=architecture,
        part=part,
        parameters=flat[0],
        more=flat[1:],
        units=units,
        activations=activations,
        rows=rows.of_all(smallest),
        planned=(planned_parts, own.share),
        initial=initial,
    )


def _whole_model(
    config: Config, architecture: ModelDescription, mesh: Mesh | None, *, device: torch.device, dtype: torch.dtype
) -> tuple[ModelDescription, HFDecoder, dict[str, Tensor]]:
    """The attached model on its device, and its weights by name where they would be rounded."""
    source, content = config.trainer.init, architecture.content
    if source.startswith(HF_PREFIX):
        folder = source_folder(source)
        read_as = exact_dtype(folder, dtype)
        model = load_model(folder, content, read_as)
    elif device.type == "meta":
        model, read_as = empty_model(content), dtype
    else:
        read_as = torch.promote_types(dtype, torch.float32)
        model = make_model(content, read_as, seed=config.trainer.seed)
        set_constants(model, architecture.buffers)
    if architecture.trained:
        train_a_part(model, architecture.trained, seed=config.trainer.seed)
    if device.type != "meta":
        architecture = replace(architecture, buffers=constants_of(model))
    exact = {name: value.detach() for name, value in model.named_parameters()} if read_as != dtype else {}
    # Where ranks share whole layers, these stay in their files' pages until they are taken over.
    if mesh is None or mesh.domain.size == 1 or mesh.tp.size > 1:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(device, dtype)
        model.to(device)
    part = HFDecoder(
        model.train(), longest_document=config.data.context_length, indexer_loss=architecture.indexer_loss,
        invariant=config.trainer.invariant,
    )  # fmt: skip
    part.require_no_randomness()
    if architecture.balance:
        part.balance = BalanceLoss(part, architecture.balance)
    return architecture, part, exact


def _require_named(frozen: Sequence[str]) -> None:
    """Raise ``ConfigError`` for parameters that attaching has frozen, and ``model.freeze`` has not."""
    if frozen:
        raise ConfigError(
            f"{frozen[0]} chooses keys, which has no gradient, and model.freeze does not have it",
            so="it would not be trained, and checkpoints, which have what is trained, would lack it",
            fix=f"set model.freeze to ['*.{frozen[0].split('.')[-3]}.*'], and begin with the model: --init hf:FOLDER; "
            'or train it by model.indexer_loss = "sparse"',
        )


def _flat_buffers(
    config: Config,
    part: HFDecoder,
    own: RankPart,
    mesh: Mesh | None,
    num_shards: int,
    like: Tensor,
) -> tuple[list[FlatParameters], Units | None]:
    """Move what is trained into flat buffers, and where ranks share layers also the rest.

    ``like``: their dtype and device.
    """
    _require_named(part.frozen)
    named, flat, units = own.named, list[FlatParameters](), None
    if mesh is not None and mesh.domain.size > 1:
        _ = part.head  # found by a pass
        if in_parallel := config.parallel.experts == "parallel":
            part.require_experts(mesh.domain.size)
        experts = part.experts if in_parallel else ()
        at_the_end = set(map(id, part.balance.parameters())) if part.balance else set()
        late = {name for name, parameter in named if id(parameter) in at_the_end}
        named, shared, units = shard_parts(
            named,
            part.parts,
            mesh,
            dtype=like.dtype,
            late=late,
            cuts=own.cuts,
            experts=experts,
        )
        flat += shared
        for _, parameter in named:
            parameter.data = parameter.data.to(like.device, like.dtype)
        part.model.to(like.device)
    if any(parameter.requires_grad for _, parameter in named):
        late = part.late_parameters()
        flat.insert(0, FlatParameters(named, num_shards, own.cuts, bucket_bytes=BUCKET_BYTES, late=late))
    return flat, units
