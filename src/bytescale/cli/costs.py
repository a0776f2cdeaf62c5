"""What ``plan`` and ``simulate`` assume of a model and its devices: one set of options, one way to the costs.

With a config, the devices are those on which ``train`` would run it. Without one, they are of the kind on which the
profile was measured, or GPUs in bf16 if nothing was measured.

A model that runs on transformers' own code is built once, with random weights, on the CPU of this machine, by the code
of ``train --init hf:``. Its operations are counted, and the memory of its layers is measured. Only the folder's
config.json is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bytescale.cli.batch_source import DEFAULT_MODEL, BatchConfig, CostSource, RatesConfig, read_profile
from bytescale.common.errors import ConfigError
from bytescale.common.limits import limits
from bytescale.common.units import format_bytes, format_si
from bytescale.config import (
    AUTO_CAPACITY,
    AUTO_HEAD_GROUPS,
    CHECKPOINT_PREFIX,
    HF_PREFIX,
    AttachedArchitecture,
    Config,
    CostConfig,
    ModelConfig,
    PlannerConfig,
    PlannerName,
    TrainerConfig,
    resolve_model,
)
from bytescale.config.attached import check_attached
from bytescale.config.validate import may_offload
from bytescale.cost import Cluster, CostModel, Profile, load_profile
from bytescale.cost.assumed import Rates
from bytescale.cost.curve import Curve
from bytescale.cost.memory import Checkpointing, DeviceKind, MeasuredMemory, MemoryModel, ModelShare, fitting_capacity
from bytescale.cost.profile_file import require_model
from bytescale.plan import Planner
from bytescale.planner import make_planner
from bytescale.simulator import ClusterConfig, step_seconds

if TYPE_CHECKING:
    from bytescale.train.parts.attached_model import HFModel

GIB = 2**30
ASSUMED_GIB = 80.0  # memory of a GPU that this machine does not have
_ELEMENT_BYTES = {"bf16": 2, "bfloat16": 2, "fp32": 4, "float32": 4, "fp64": 8, "float64": 8}
BYTES_PER_PARAMETER = 12
"""Of this machine's memory, while an attached model is built: weights, their copy in flat memory, and gradients."""


@dataclass(slots=True, kw_only=True)
class CostOptions:
    """The options of a command that works out how long a model's step takes, and how much memory."""

    capacity_tokens: int = field(default=8192, metadata=limits(least=0))
    """Tokens that one micro-batch of a rank may hold. auto: as many as fit on its devices beside the model."""
    device_gib: float | None = field(default=None, metadata=limits(above=0))
    """GiB of a device that may be used. Unset: what training with the config would use here, or 80."""
    checkpointing: Checkpointing = "none"
    """Which activations backward computes again. It counts for memory, not for times. A config brings its own."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """The sequences."""
    cost: CostSource = field(default_factory=CostSource)
    """Where the times come from."""
    model: Annotated[ModelConfig, tyro.conf.arg(name="model")] = field(default_factory=lambda: replace(DEFAULT_MODEL))
    """The model, if times come from counted operations."""

    @staticmethod
    def defaults_of(config: Config) -> dict[str, Any]:
        """Return the options that a config gives."""
        return {
            "batch": BatchConfig(context=config.data.context_length, tokens=config.data.batch_tokens),
            "capacity_tokens": config.parallel.capacity_tokens,
            "device_gib": config.memory.device_gib,
            "checkpointing": config.trainer.checkpointing,
            "cost": CostSource(profile=config.cost.profile),
            "model": config.model,
        }


@dataclass(frozen=True)
class Costs:
    """The times of a step, and the memory of the devices that it runs on.

    Memory is worked out only when somebody asks, because that may import torch.
    """

    options: CostOptions
    config: Config | None
    cluster: ClusterConfig
    profile: Profile
    """Without what checkpointing changes in memory (``checkpointed_profile``)."""
    attached: HFModel | None
    """A model that runs on transformers' own code; None if it is our own Llama or Mixtral."""

    @cached_property
    def usable_bytes(self) -> float:
        """Bytes of a device that may be used."""
        if self.options.device_gib is not None:
            return self.options.device_gib * GIB
        return _usable_bytes_here(self.config, self._device[0])

    @cached_property
    def memory(self) -> MemoryModel | MeasuredMemory:
        """The memory of the fullest device of a rank: that of the pipeline's fullest stage."""
        config, (kind, element_bytes) = self.config, self._device
        trainer = _trainer_of(config)
        if self.attached is not None:
            return self.attached.memory(kind, self.cluster.num_ranks, trainer.ring_gradients)
        share = ModelShare(
            architecture=self.profile.architecture,
            tensor_parallel=self.profile.tensor_parallel,
            num_stages=self.cluster.pp,
            virtual_stages=self.cluster.virtual_stages,
        )
        model = MemoryModel.on_device(
            share,
            kind,
            element_bytes=element_bytes,
            num_ranks=self.cluster.num_ranks,
            checkpointing=self.options.checkpointing,
            attention=trainer.attention,
            ring_gradients=trainer.ring_gradients,
        )
        if trainer.head_groups == AUTO_HEAD_GROUPS:
            offload = config is not None and may_offload(config, kind)
            tokens = self.options.capacity_tokens or None
            model = model.in_head_groups(self.usable_bytes, capacity_tokens=tokens, offload=offload)
        else:
            model = replace(model, head_groups=trainer.head_groups)
        return model.fullest_stage(self.usable_bytes)

    @cached_property
    def cost_model(self) -> CostModel:
        """What planners know of the times."""
        return self.profile.cost_model(ranks_per_node=self.cluster.ranks_per_node, pipeline_parallel=self.cluster.pp)

    def planner(self, name: PlannerName) -> Planner:
        """Return the planner of that name for the ranks of ``cluster``. Raises as ``capacity_tokens``."""
        return make_planner(
            PlannerConfig(name=name),
            Cluster.uniform(self.cluster.num_ranks, self.capacity_tokens),
            self.cost_model,
            context_length=0 if self.options.batch.lengths else self.options.batch.context,
            num_stages=self.cluster.pp,
            step_seconds=partial(step_seconds, profile=self.checkpointed_profile, cluster=self.cluster),
        )

    @cached_property
    def capacity_tokens(self) -> int:
        """The capacity in tokens; for "auto" as many as fit. Raises ``ConfigError`` if none fits."""
        wanted = self.options.capacity_tokens
        return wanted if wanted != AUTO_CAPACITY else fitting_capacity(self.memory, wanted, self.usable_bytes)

    @cached_property
    def checkpointed_profile(self) -> Profile:
        """The profile with what a layer keeps under checkpointing. Profiles are measured without it."""
        memory = None if self.options.checkpointing == "none" else self.memory
        if memory is None or isinstance(memory, MeasuredMemory):
            return self.profile  # rows of attached models are measured under their checkpointing
        return replace(self.profile, activation_bytes=Curve(0.0, memory.layer_saved_bytes_per_token, 0.0))

    @property
    def _device(self) -> tuple[DeviceKind, int]:
        """The kind of device, and the bytes of a number in the compute dtype. Counted profiles name no device."""
        return _kind_and_precision(self.config, "" if self.attached is not None else self.profile.device)


def costs_of(
    options: CostOptions, config: Config | None, cluster: ClusterConfig, *, longest: int, vocab_size: int | None = None
) -> Costs:
    """Return the costs of a model on ``cluster``.

    Args:
        options, config: as the command has them.
        cluster: the devices and their layout.
        longest: tokens of the longest sequence.
        vocab_size: the vocabulary size of the tokenizer, if it is known.

    Raises ``ConfigError`` if the model cannot be attached, does not fit into this machine or lacks what is asked for,
    or if its layers cannot be cut into the stages of ``cluster``.
    """
    ring_gradients = _trainer_of(config).ring_gradients
    attached = _attached_model(options, config, cluster, longest)
    if attached is not None:
        profile = attached.profile(_rates(options.cost.rates), ring_gradients)
        if options.cost.profile is not None:
            measured = load_profile(options.cost.profile)
            require_model(measured, attached.spec.stack)
            profile = replace(measured.of_model(attached.spec.stack), activation_bytes=profile.activation_bytes)
    else:
        profile = read_profile(
            options.cost,
            options.model,
            tensor_parallel=cluster.tp,
            model_is_given=config is not None or options.model != DEFAULT_MODEL,
            vocab_size=vocab_size,
            ring_gradients=ring_gradients,
        )
    cluster.check_layers(profile.architecture.num_layers)
    return Costs(options=options, config=config, cluster=cluster, profile=profile, attached=attached)


def _trainer_of(config: Config | None) -> TrainerConfig:
    return TrainerConfig() if config is None else config.trainer


def _kind_and_precision(config: Config | None, measured_on: str) -> tuple[DeviceKind, int]:
    """``measured_on``: the device of the profile (``Profile.device``); empty without a measured one."""
    name, _, measured_dtype = measured_on.partition(", ")
    measured: DeviceKind = "cpu" if name == "cpu" else "cuda"
    if config is None:
        return measured, _ELEMENT_BYTES.get(measured_dtype, 2)
    kind, dtype = config.trainer.device, config.trainer.dtype
    if kind == "auto":
        kind = measured if measured_on else _kind_here()
    return kind, (2 if kind == "cuda" else 4) if dtype == "auto" else _ELEMENT_BYTES[dtype]


def _kind_here() -> DeviceKind:
    """Return the kind of device that training would choose here. Without torch nothing can train, so it is a GPU."""
    if find_spec("torch") is None:
        return "cuda"
    from bytescale.train.ranks import choose_device

    return "cuda" if choose_device("auto", 0, 1).type == "cuda" else "cpu"


def _usable_bytes_here(config: Config | None, kind: DeviceKind) -> float:
    """Return the bytes of a device that training may use here, or ``ASSUMED_GIB`` if the config cannot run here."""
    if config is None or find_spec("torch") is None or (kind == "cuda" and _kind_here() == "cpu"):
        return ASSUMED_GIB * GIB
    import torch

    from bytescale.train.parts.budget import usable_device_bytes

    return usable_device_bytes(config, torch.device(kind), config.parallel.ranks)


def _rates(rates: RatesConfig) -> Rates:
    return Rates(
        flops_per_second=rates.flops,
        attention_flops_per_second=rates.attention_flops,
        launch_seconds=rates.launch,
        intra_node_bytes_per_second=rates.intra_node,
        inter_node_bytes_per_second=rates.inter_node,
        latency_seconds=rates.latency,
        host_bytes_per_second=rates.host,
    )


def _attached_model(
    options: CostOptions, config: Config | None, cluster: ClusterConfig, longest: int
) -> HFModel | None:
    """Build the model of ``options``; None if it is our own Llama or Mixtral."""
    if not options.model.preset.startswith((HF_PREFIX, CHECKPOINT_PREFIX)):
        return None
    architecture = resolve_model(options.model)
    if not isinstance(architecture, AttachedArchitecture):
        return None
    base = config or Config()
    degrees = {"tp": cluster.tp, "pp": cluster.pp, "virtual_stages": cluster.virtual_stages}
    settings = replace(
        base,
        model=options.model,
        parallel=replace(base.parallel, **degrees),
        cost=CostConfig(profile=options.cost.profile),
        data=replace(base.data, context_length=longest),  # rotary positions may depend on it
        trainer=replace(base.trainer, init="", checkpointing=options.checkpointing),
    )
    check_attached(settings, architecture)
    import torch

    from bytescale.attach.folder import parameters_of
    from bytescale.attention import select_kernel
    from bytescale.train.parts.attached_model import build_attached_model
    from bytescale.train.parts.budget import machine_bytes

    number = sum(value.numel() for value in parameters_of(architecture.content).values())
    here = machine_bytes()
    if number * BYTES_PER_PARAMETER > here:
        raise ConfigError(
            f"{options.model.preset} has {format_si(number)} parameters; it is built once to be planned for, which "
            f"takes {format_bytes(number * BYTES_PER_PARAMETER)}, and this machine has {format_bytes(here)}",
            so="it cannot be attached and measured here",
            fix="plan on a machine with more memory, or name a preset of about the same shape, such as 70b",
        )
    element_bytes = _kind_and_precision(config, "")[1]
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[element_bytes]
    device = torch.device("cpu")
    kernel = select_kernel("auto", device, dtype)
    return build_attached_model(settings, architecture, kernel, device=device, dtype=dtype, num_shards=1)
