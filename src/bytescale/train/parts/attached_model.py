"""A decoder of transformers in the trainer: on our attention, in flat buffers, with its memory measured.

It has HDP, ZeRO-1 with overlap, activation checkpointing, offloading and checkpoints as our own models have. It has no
tensor parallelism and no pipeline (``config.attached``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bytescale.attach.costs import count_costs, counted_profile, training_flops
from bytescale.attach.decoder import AttachedDecoder
from bytescale.attach.folder import constants_of, load_model, make_model, set_constants
from bytescale.attach.measure import measure_rows, measured_memory
from bytescale.attach.partly_trained import train_a_part
from bytescale.attach.widths import check_widths
from bytescale.attention import AttentionKernel
from bytescale.attention.kernels import CudaFlashKernel
from bytescale.checkpoint.initial_weights import folder_of, load_master_weights
from bytescale.common.arrays import IntArray
from bytescale.common.units import format_si
from bytescale.config import CHECKPOINT_PREFIX, HF_PREFIX, AttachedArchitecture, Config, RingGradients
from bytescale.config.validate import hdp_ranks, may_offload
from bytescale.cost import CostModel, Profile
from bytescale.cost.assumed import ASSUMED, Rates
from bytescale.cost.memory import DeviceKind, MeasuredMemory, MeasuredRows
from bytescale.models.hf_folder import exact_dtype
from bytescale.runtime import Activations, Decoder, FlatParameters, HostPool, ShardedOptimizer
from bytescale.train.parts.budget import MemoryBudget, measured_budget, usable_host_bytes
from bytescale.train.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class HFModel:
    """One rank's model.

    Attributes:
        architecture: with the constants that belong to the weights.
        part: the model on our attention.
        parameters: in flat buffers.
        activations: what becomes of its layers' activations.
        rows: the memory that a token was seen to need.
        masters: this rank's shards of the weights as they were read; empty where the parameters are not rounded.
    """

    architecture: AttachedArchitecture
    part: AttachedDecoder
    parameters: FlatParameters
    activations: Activations
    rows: MeasuredRows
    masters: list[Tensor]

    @property
    def decoder(self) -> Decoder:
        """The model as the executor runs it."""
        return Decoder(module=self.part, activations=self.activations, head=self.part.head)

    def describe(self) -> str:
        """A line for people."""
        layers = self.part.facts.layers
        windows = sorted({layer.rules.window for layer in layers if layer.rules.window is not None})
        windowed = sum(layer.rules.window is not None for layer in layers)
        told = f", {windowed} of them with windows of {', '.join(map(str, windows))}" if windows else ""
        count = sum(parameter.numel() for parameter in self.part.parameters())
        trained = sum(parameter.numel() for parameter in self.parameters.parameters)
        part = f" ({format_si(trained)} trained)" if trained < count else ""
        return (
            f"{format_si(count)} parameters{part}, {self.architecture.model_type} on transformers' own code, "
            f"{len(layers)} layers{told}, hidden {self.part.hidden_size}, {layers[0].num_heads} heads over "
            f"{layers[0].num_kv_heads}, vocabulary {self.architecture.vocab_size}"
        )

    def cost(self, device: torch.device) -> CostModel:
        """What planners believe, from counts alone."""
        return count_costs(
            self.part.model,
            self.part.facts,
            device_type=device.type,
            bytes_per_element=self.parameters.values.element_size(),
        )

    def training_flops(self, lengths: IntArray) -> int:
        """Operations of the model over documents of these lengths."""
        return training_flops(self.part.model, self.part.facts, lengths)

    def memory(
        self,
        config: Config,
        device: torch.device,
        num_ranks: int,
        smallest: Callable[[Sequence[float]], Sequence[float]] = list,
    ) -> MemoryBudget:
        """The budget of a run. Raises ``ConfigError`` as ``budget.memory_budget``."""
        kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
        ring_gradients = config.trainer.ring_gradients
        return measured_budget(
            config,
            self.measured_memory(kind, hdp_ranks(config.parallel, num_ranks), ring_gradients),
            times=self.profile(ASSUMED[kind], ring_gradients),
            num_layers=len(self.part.layers),
            device=device,
            num_ranks=num_ranks,
            smallest=smallest,
        )

    def measured_memory(self, kind: DeviceKind, num_ranks: int, ring_gradients: RingGradients) -> MeasuredMemory:
        """What a micro-batch needs on one of ``num_ranks`` devices of a ``kind``, by the measured rows."""
        return measured_memory(
            self.part,
            self.rows,
            kind=kind,
            num_ranks=num_ranks,
            ring_gradients=ring_gradients,
        )

    def profile(self, rates: Rates, ring_gradients: RingGradients) -> Profile:
        """The times of a step by counted operations, for ``plan`` and ``simulate``."""
        return counted_profile(
            self.part.model,
            self.part.facts,
            rates,
            bytes_per_element=self.parameters.values.element_size(),
            ring_gradients=ring_gradients,
            kept_bytes_per_token=self.rows.saved_per_token,
        )

    def optimizer(self, config: Config, ranks: Ranks) -> ShardedOptimizer:
        """The optimizer of this rank's shards, with the initial weights of ``config`` in full precision."""
        optimizer = ShardedOptimizer.of_config(self.parameters, config.optimizer, ranks.mesh)
        if config.trainer.gradient_bucket_mib:
            optimizer.overlap_with([(self.part, self.part.layers)])
        if self.masters:
            for shard, own in zip(optimizer.zeros[0].shards, self.masters, strict=True):
                shard.master.copy_(own)
            self.masters.clear()
        if config.trainer.init.startswith(CHECKPOINT_PREFIX):
            load_master_weights(config.trainer.init, self.architecture.as_dict(), optimizer, ranks.checkpoint_group)
        return optimizer


def build_attached_model(
    config: Config,
    architecture: AttachedArchitecture,
    kernel: AttentionKernel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_shards: int,
    rank: int = 0,
) -> HFModel:
    """Load or make the model, attach it, move its parameters into flat memory and measure its layers.

    Raises:
        ConfigError: the model cannot be attached, or has no weights that can be read.
        CheckpointError: weights are missing, have other shapes or no place.
    """
    # 1. The model with weights that are not rounded; then on our attention, on its device.
    source, content = config.trainer.init, architecture.content
    if source.startswith(HF_PREFIX):
        folder = folder_of(source)
        read_as = exact_dtype(folder, dtype)
        model = load_model(folder, content, read_as)
    else:
        read_as = torch.promote_types(dtype, torch.float32)
        model = make_model(content, read_as, seed=config.trainer.seed)
        set_constants(model, architecture.buffers)
    if architecture.trained:
        train_a_part(model, architecture.trained, seed=config.trainer.seed)
    architecture = replace(architecture, buffers=constants_of(model))
    exact = {name: value.detach() for name, value in model.named_parameters()} if read_as != dtype else {}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, dtype)
    part = AttachedDecoder(model.to(device).train(), longest_document=config.data.context_length)
    part.require_training()
    check_widths(part.facts, cuda_flash=isinstance(kernel, CudaFlashKernel))

    # 2. Flat buffers, in the order in which the model names its parameters.
    parameters = FlatParameters(
        part.model.named_parameters(),
        num_shards,
        bucket_bytes=int(config.trainer.gradient_bucket_mib * 2**20),
        late=part.late_parameters(),
    )

    masters = shard_of(exact, parameters, rank) if exact else []
    exact.clear()

    # 3. Checkpointing and offloading, and what a token needs with them.
    activations, rows = _measured_activations(config, part, kernel, device, num_ranks=num_shards)
    parameters.zero_gradients()
    return HFModel(
        architecture=architecture,
        part=part,
        parameters=parameters,
        activations=activations,
        rows=rows,
        masters=masters,
    )


def _measured_activations(
    config: Config, part: AttachedDecoder, kernel: AttentionKernel, device: torch.device, *, num_ranks: int
) -> tuple[Activations, MeasuredRows]:
    """Apply checkpointing and offloading to the layers, and measure what a token needs then."""
    pool = None
    if may_offload(config, device.type):
        pool = HostPool(int(usable_host_bytes(config, num_ranks)), pinned=device.type == "cuda")
    activations = Activations(part.layers, checkpointing=config.trainer.checkpointing, pool=pool, device=device)
    rows = measure_rows(part, kernel, activations, device)
    if pool is not None:
        pool.token_bytes = rows.moved_per_token
    return activations, rows


def shard_of(exact: Mapping[str, Tensor], parameters: FlatParameters, rank: int) -> list[Tensor]:
    """The values of ``exact``, by name, that lie in each of a rank's parts of the flat buffers, in host memory."""
    shards = []
    for place in parameters.shards(rank):
        shard = torch.zeros(place.stop - place.start, dtype=parameters.master_dtype)
        for piece in parameters.pieces(place):
            own = exact[piece.entry.name].flatten()[piece.start - piece.entry.start : piece.stop - piece.entry.start]
            shard[piece.start - place.start : piece.stop - place.start] = own
        shards.append(shard)
    return shards
