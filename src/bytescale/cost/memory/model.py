"""The memory of our own models, counted from their shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bytescale.config import Architecture, Config
from bytescale.config.validate import may_offload
from bytescale.cost import flops
from bytescale.cost.memory.device_kernels import DeviceKind, KernelMemory, nccl_reserve_bytes
from bytescale.cost.memory.device_memory import DeviceMemory, States
from bytescale.cost.memory.measured import MeasuredMemory
from bytescale.cost.memory.phases import CountedMemory
from bytescale.cost.memory.rows import Checkpointing, ModelShare
from bytescale.cost.offload_rule import OffloadRule
from bytescale.cost.profile import Profile
from bytescale.cost.stage import movable_layers

_ABOUT_AS_MANY = 0.95  # each group more costs a pass over a layer's input; it should be worth it


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel(CountedMemory):
    """The memory of one device. By default, a rank is one device that holds the whole model. All results are in bytes.

    A pipeline stage holds what layers save for all micro-batches in flight, each of which is taken to be as large as
    the one that is asked about. ``cost.memory.phases`` has the phases.
    """

    num_ranks: int
    """HDP ranks, over which the optimizer's states are sharded."""
    optimizer_on_host: bool = False
    nccl_bytes: int = 0
    """What NCCL holds beside everything that is counted here."""

    @staticmethod
    def on_device(
        share: ModelShare,
        kind: DeviceKind,
        *,
        element_bytes: int,
        num_ranks: int,
        checkpointing: Checkpointing = "none",
        attention: str = "auto",
    ) -> MemoryModel:
        """Return the model of a device of this ``kind`` that works as ``runtime`` does: same kernels, same chunks.

        It has one group of heads.
        """
        tensor_parallel = share.tensor_parallel
        return MemoryModel(
            share=share,
            element_bytes=element_bytes,
            num_ranks=num_ranks,
            kernels=KernelMemory.of_device(
                kind,
                share.architecture,
                element_bytes=element_bytes,
                tensor_parallel=tensor_parallel,
                attention=attention,
            ),
            checkpointing=checkpointing,
            nccl_bytes=nccl_reserve_bytes(num_ranks, tensor_parallel, share.num_stages) if kind == "cuda" else 0,
        )

    @staticmethod
    def of_config(
        config: Config,
        counted: Architecture | MeasuredMemory,
        kind: DeviceKind,
        *,
        element_bytes: int,
        num_ranks: int,
        device_bytes: float,
        domain: int = 1,
    ) -> DeviceMemory:
        """Return the memory of a run, in as many groups of heads as ``config`` says or as ``device_bytes`` need.

        ``counted``: the shape of the model; or its memory, if that was measured, which is returned. ``domain``: HDP
        ranks that share weights.
        """
        in_parallel = config.parallel.experts == "parallel" and domain > 1
        if isinstance(counted, MeasuredMemory):
            states = replace(counted.states, domain=domain, experts_in_parallel=in_parallel)
            return replace(counted, states=replace(states, on_host=config.optimizer.offload))
        parallel = config.parallel
        whole = MemoryModel.on_device(
            ModelShare(architecture=counted, tensor_parallel=parallel.tp, num_stages=parallel.pp),
            kind,
            element_bytes=element_bytes,
            num_ranks=num_ranks,
            checkpointing=config.memory.checkpointing,
            attention=config.kernels.attention,
        )
        whole = replace(
            whole, domain=domain, experts_in_parallel=in_parallel, optimizer_on_host=config.optimizer.offload
        )
        tokens = parallel.capacity_tokens or None
        return whole.in_head_groups(device_bytes, capacity_tokens=tokens, offload=may_offload(config, kind))

    def in_head_groups(self, device_bytes: float, *, capacity_tokens: int | None, offload: bool) -> MemoryModel:
        """Return a copy that uses the fewest groups of heads with which ``capacity_tokens`` fit on every stage.

        If ``capacity_tokens`` is None, the copy has the fewest groups with which about as many tokens fit as with any
        number of groups; with ``offload``, tokens are then offloaded as far as possible. Where no number of groups
        suffices, the copy has the most.
        """
        most = self.most_head_groups
        choices = [replace(self, head_groups=groups) for groups in range(1, most + 1) if most % groups == 0]
        moved_share = float(offload and capacity_tokens is None)
        fitting = [min(stage.capacity_tokens(device_bytes, moved_share) for stage in m.stages()) for m in choices]
        wanted = _ABOUT_AS_MANY * max(fitting) if capacity_tokens is None else capacity_tokens
        return next((m for m, fits in zip(choices, fitting, strict=True) if fits >= wanted), choices[-1])

    @property
    def most_head_groups(self) -> int:
        """The largest number of groups: one key/value head of this device in each. Without checkpointing it is 1."""
        return 1 if self.checkpointing == "none" else self.share.key_heads

    def stages(self) -> list[MemoryModel]:
        """Return the same for every stage of the pipeline."""
        return [replace(self, share=replace(self.share, stage=stage)) for stage in range(self.share.num_stages)]

    def fullest_stage(self, device_bytes: float) -> MemoryModel:
        """Return the same for the stage that has room for the fewest tokens, and the first of several such stages."""
        return min(self.stages(), key=lambda stage: stage.capacity_tokens(device_bytes))

    @property
    def states(self) -> States:
        shape, parts = self.share.architecture, self.share.tensor_parallel
        layer = flops.layer_parameters(shape, tensor_parallel=parts)
        if parts > 1:  # norms and routers, which tensor-parallel ranks hold alike, are not shared
            layer -= (2 + shape.num_experts) * shape.hidden_size
        words = flops.head_parameters(shape) // parts
        ends = (0, 0, words) if shape.tie_embeddings else (words, words, 0)
        units = (ends[0], *(layer,) * self.share.num_layers, *ends[1:])
        experts = 3 * shape.num_experts * shape.ffn_hidden_size * shape.hidden_size // parts
        return States(
            num_parameters=self.share.num_parameters,
            element_bytes=self.element_bytes,
            num_ranks=self.num_ranks,
            domain=self.domain,
            trained_of_units=units,
            frozen_of_units=(0,) * len(units),
            trained_experts=(0, *(experts,) * self.share.num_layers, *(0 for _ in ends[1:])),
            experts_in_parallel=self.experts_in_parallel,
            on_host=self.optimizer_on_host,
        )

    @property
    def layer_saved_bytes_per_token(self) -> int:
        return self.rows.kept

    @property
    def saved_bytes_per_token(self) -> int:
        """What all layers, the final norm and the rotary angles keep of a token, of all micro-batches in flight."""
        rows = self.rows
        return self.share.num_in_flight * (self.share.num_layers * rows.kept + rows.beside_layers)

    @property
    def movable_bytes_per_token(self) -> int:
        """The part of it that may wait in host memory: what all layers but the last ones keep."""
        return self.share.num_in_flight * movable_layers(self.share.num_layers) * self.rows.kept

    def offload_rule(self, times: Profile, host_bytes: float) -> OffloadRule:
        return OffloadRule.of_layers(
            times,
            self.layer_saved_bytes_per_token,
            num_layers=self.share.num_layers,
            movable_share=self.limits().movable_share,
            host_bytes=host_bytes / self.share.num_in_flight,
        )
