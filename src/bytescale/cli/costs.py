"""What ``plan`` and ``simulate`` assume of a model and its devices: one set of options, one way to the costs.

With a config that names a corpus, the devices are those on which ``train`` would run it. Without one, they are of the
kind on which the profile was measured, or GPUs in bf16 if nothing was measured.

A model that runs on transformers' own code is built once, with random weights, on the CPU of this machine, by the code
of ``train --init hf:``. Its operations are counted, and the memory of its layers is measured. Only the folder's
config.json is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from bytescale.cli.batch_source import BatchConfig
from bytescale.cli.options import Settings, leading_path, read
from bytescale.common.errors import ConfigError
from bytescale.common.limits import limits
from bytescale.common.units import KIBI, format_bytes, format_si
from bytescale.config import (
    AUTO_CAPACITY,
    CHECKPOINT_PREFIX,
    HF_PREFIX,
    Architecture,
    AttachedArchitecture,
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    PlannerName,
    resolve_architecture,
    resolve_model,
    sharing_domain,
)
from bytescale.config.attached import check_attached
from bytescale.cost import Cluster, CostModel, Profile, load_profile
from bytescale.cost.assumed import Rates
from bytescale.cost.curve import Curve
from bytescale.cost.gradient_sync import round_seconds
from bytescale.cost.memory import DeviceKind, DeviceMemory, MemoryModel, fitting_capacity
from bytescale.cost.profile_file import require_model, warn_of_bad_fits
from bytescale.cost.spec import ModelSpec
from bytescale.plan import Planner
from bytescale.planner import make_planner
from bytescale.simulator import ClusterConfig, step_seconds

if TYPE_CHECKING:
    from bytescale.train.parts.attached_model import HFModel

GIB = 2**30
ASSUMED_GIB = 80.0  # memory of a GPU that this machine does not have
_ELEMENT_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
BYTES_PER_PARAMETER = 12
"""Of this machine's memory, while an attached model is built: weights, their copy in flat memory, and gradients."""

DEFAULTS = Config(
    model=ModelConfig(preset="7b"),
    data=DataConfig(context_length=2 * KIBI * KIBI, batch_tokens=32 * KIBI * KIBI),
    parallel=ParallelConfig(ranks=1024),
    memory=MemoryConfig(offload="off"),
)
"""The settings without a config file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """The options of a command that works out how long a model's step takes, and how much memory."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    """The sequences."""
    rates: Rates = field(default_factory=Rates)
    """Rates of one device, from which times follow if `cost.profile` names no profile."""
    gpus_per_node: int = field(default=8, metadata=limits(least=1))
    """Devices that share a node and its fast links."""
    config: Settings
    """All settings. `parallel.ranks` counts the devices of the cluster."""

    def layout(self) -> ClusterConfig:
        """Return the devices of the modelled cluster."""
        parallel = self.config.parallel
        return ClusterConfig(
            num_gpus=parallel.ranks,
            gpus_per_node=self.gpus_per_node,
            tp=parallel.tp,
            pp=parallel.pp,
            virtual_stages=parallel.virtual_stages,
            gradient_bucket_mib=parallel.gradient_bucket_mib,
        )


Kind = TypeVar("Kind", bound=CostOptions)


def read_cost_options(kind: type[Kind], arguments: Sequence[str], *, prog: str) -> Kind:
    """Read the options of ``plan`` or ``simulate``. Raises ``ConfigError`` for a config without anything to plan."""
    options = read(kind, arguments, prog=prog, default=DEFAULTS)
    path, _ = leading_path(arguments)
    if path and not options.config.data.sources and not options.batch.lengths and not getattr(options, "plan", None):
        raise ConfigError(
            f"{path} names no data.sources",
            so="there is no batch to plan",
            fix="name them, or --batch.lengths FILE, or leave the config out",
        )
    return options


@dataclass(frozen=True)
class Costs:
    """The times of a step, and the memory of the devices that it runs on.

    Memory is worked out only when somebody asks, because that may import torch.
    """

    options: CostOptions
    cluster: ClusterConfig
    profile: Profile
    """Without what checkpointing changes in memory (``checkpointed_profile``)."""
    attached: HFModel | None
    """A model that runs on transformers' own code; None if it is our own Llama or Mixtral."""

    @property
    def config(self) -> Config:
        """All settings."""
        return self.options.config

    @cached_property
    def usable_bytes(self) -> float:
        """Bytes of a device that may be used."""
        if self.config.memory.device_gib is not None:
            return self.config.memory.device_gib * GIB
        return _usable_bytes_here(self.config, self._device[0])

    @cached_property
    def memory(self) -> DeviceMemory:
        """The memory of the fullest device of a rank: that of the pipeline's fullest stage."""
        config, (kind, element_bytes), num_ranks = self.config, self._device, self.cluster.num_ranks
        if self.attached is not None:
            return self.attached.memory(kind, num_ranks, config.parallel.ring_gradients, self.domain)
        return MemoryModel.of_config(
            config,
            self.profile.architecture,
            kind,
            element_bytes=element_bytes,
            num_ranks=num_ranks,
            device_bytes=self.usable_bytes,
            domain=self.domain,
        ).fullest_stage(self.usable_bytes)

    @cached_property
    def cost_model(self) -> CostModel:
        """What planners know of the times."""
        per_node = self.cluster.ranks_per_node
        cost = self.profile.cost_model(ranks_per_node=per_node, pipeline_parallel=self.cluster.pp)
        a_round = round_seconds(self.profile, domain=self.domain, ranks_per_node=per_node)
        return replace(cost, gather_seconds=a_round.of_round)

    @property
    def domain(self) -> int:
        """Consecutive ranks that share parameters and run in lockstep. Raises ``ConfigError`` if it is impossible."""
        parallel, num_ranks = self.config.parallel, self.cluster.num_ranks
        return sharing_domain(parallel.shard, parallel.domain, num_ranks, min(self.cluster.ranks_per_node, num_ranks))

    def planner(self, name: PlannerName) -> Planner:
        """Return the planner of that name for the ranks of ``cluster``. Raises as ``capacity_tokens``."""
        return make_planner(
            replace(self.config.planner, name=name),
            Cluster.uniform(self.cluster.num_ranks, self.capacity_tokens),
            self.cost_model,
            context_length=0 if self.options.batch.lengths else self.config.data.context_length,
            num_stages=self.cluster.pp,
            domain=self.domain,
            step_seconds=partial(step_seconds, profile=self.checkpointed_profile, cluster=self.cluster),
        )

    @cached_property
    def capacity_tokens(self) -> int:
        """The capacity in tokens; for "auto" as many as fit. Raises ``ConfigError`` if none fits."""
        wanted = self.config.parallel.capacity_tokens
        return wanted if wanted != AUTO_CAPACITY else fitting_capacity(self.memory, wanted, self.usable_bytes)

    @cached_property
    def checkpointed_profile(self) -> Profile:
        """The profile with what a layer keeps under checkpointing. Profiles are measured without it."""
        if self.attached is None and self.config.memory.checkpointing == "none":
            return self.profile
        return replace(self.profile, activation_bytes=Curve(0.0, self.memory.layer_saved_bytes_per_token, 0.0))

    @property
    def _device(self) -> tuple[DeviceKind, int]:
        """The kind of device, and the bytes of a number in the compute dtype. Counted profiles name no device."""
        return _kind_and_precision(self.config, "" if self.attached is not None else self.profile.device)


def costs_of(options: CostOptions, cluster: ClusterConfig, *, longest: int, vocab_size: int | None = None) -> Costs:
    """Return the costs of a model on ``cluster``.

    Args:
        options: as the command has them.
        cluster: the devices and their layout.
        longest: tokens of the longest sequence.
        vocab_size: the vocabulary size of the tokenizer, if it is known.

    Raises ``ConfigError`` if the model cannot be attached, does not fit into this machine or lacks what is asked for,
    or if its layers cannot be cut into the stages of ``cluster``.
    """
    attached = _attached_model(options.config, longest)
    profile = _profile(options, attached, vocab_size)
    cluster.check_layers(profile.architecture.num_layers)
    return Costs(options=options, cluster=cluster, profile=profile, attached=attached)


def _profile(options: CostOptions, attached: HFModel | None, vocab_size: int | None) -> Profile:
    """Return the named profile, or one made from the counted operations of the model.

    A profile has a model of its own. If a model is given as well, its layers must have the same shape.
    """
    config, tp = options.config, options.config.parallel.tp
    model: Architecture | ModelSpec | None = None
    if attached is not None:
        model = attached.spec
    elif config.cost.profile is None or config.data.sources or config.model != DEFAULTS.model:
        model = resolve_architecture(config.model, tokenizer_vocab_size=vocab_size)
    if config.cost.profile is None:
        assert model is not None, "without a profile there is a model"
        element_bytes = _kind_and_precision(config, "")[1]
        profile = options.rates.profile(model, tensor_parallel=tp, bytes_per_element=element_bytes)
    else:
        profile = load_profile(config.cost.profile)
        warn_of_bad_fits(profile)
        if model is not None:
            stack = ModelSpec.of(model).stack
            require_model(profile, stack)
            profile = profile.of_model(stack)
        if tp != profile.tensor_parallel:
            profile = profile.scaled_to(profile.architecture, tensor_parallel=tp)
    return profile.with_ring_gradients(config.parallel.ring_gradients)


def _kind_and_precision(config: Config, measured_on: str) -> tuple[DeviceKind, int]:
    """``measured_on``: the device of the profile (``Profile.device``); empty without a measured one."""
    kind, dtype = config.trainer.device, config.trainer.dtype
    if kind == "auto" and measured_on:
        kind = "cpu" if measured_on.partition(",")[0] == "cpu" else "cuda"
    elif kind == "auto":
        kind = _kind_here() if config.data.sources else "cuda"
    return kind, (2 if kind == "cuda" else 4) if dtype == "auto" else _ELEMENT_BYTES[dtype]


def _kind_here() -> DeviceKind:
    """Return the kind of device that training would choose here. Without torch nothing can train, so it is a GPU."""
    if find_spec("torch") is None:
        return "cuda"
    from bytescale.train.ranks import choose_device

    return "cuda" if choose_device("auto", 0, 1).type == "cuda" else "cpu"


def _usable_bytes_here(config: Config, kind: DeviceKind) -> float:
    """Return the bytes of a device that training may use here, or ``ASSUMED_GIB`` if the config cannot run here."""
    if not config.data.sources or find_spec("torch") is None or (kind == "cuda" and _kind_here() == "cpu"):
        return ASSUMED_GIB * GIB
    import torch

    from bytescale.train.parts.budget import usable_device_bytes

    return usable_device_bytes(config, torch.device(kind), config.parallel.ranks)


def _attached_model(config: Config, longest: int) -> HFModel | None:
    """Build the model of ``config``; None if it is our own Llama or Mixtral."""
    if not config.model.preset.startswith((HF_PREFIX, CHECKPOINT_PREFIX)):
        return None
    architecture = resolve_model(config.model)
    if not isinstance(architecture, AttachedArchitecture):
        return None
    settings = replace(
        config,
        data=replace(config.data, context_length=longest),  # rotary positions may depend on it
        trainer=replace(config.trainer, init=""),
    )
    check_attached(settings, architecture)
    import torch

    from bytescale.attention import select_kernel
    from bytescale.hf.files.folder import parameters_of
    from bytescale.train.parts.attached_model import build_attached_model
    from bytescale.train.parts.budget import machine_bytes

    number = sum(value.numel() for value in parameters_of(architecture.content).values())
    here = machine_bytes()
    if number * BYTES_PER_PARAMETER > here:
        raise ConfigError(
            f"{config.model.preset} has {format_si(number)} parameters; it is built once to be planned for, which "
            f"takes {format_bytes(number * BYTES_PER_PARAMETER)}, and this machine has {format_bytes(here)}",
            so="it cannot be attached and measured here",
            fix="plan on a machine with more memory, or name a preset of about the same shape, such as 70b",
        )
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[_kind_and_precision(config, "")[1]]
    device = torch.device("cpu")
    kernel = select_kernel("auto", device, dtype)
    return build_attached_model(settings, architecture, kernel, device=device, dtype=dtype, num_shards=1)
