"""``plan`` and ``simulate`` for models that run on transformers' own code, through the code of ``train --init hf:``.

The model is built once, with random weights, on the CPU of this machine. It is put on our attention, its operations are
counted, and the memory of its layers is measured. Only the folder's config.json is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bytescale.cli.batch_source import RatesConfig
from bytescale.cli.devices import GIB, AssumedDevices, kind_and_precision, usable_bytes_of
from bytescale.common.errors import ConfigError, problem
from bytescale.common.units import format_bytes, format_si
from bytescale.config import (
    CHECKPOINT_PREFIX,
    HF_PREFIX,
    AttachedArchitecture,
    Config,
    CostConfig,
    ModelConfig,
    ParallelConfig,
    TrainerConfig,
    resolve_model,
)
from bytescale.config.attached import check_attached
from bytescale.cost import Profile
from bytescale.cost.memory import Checkpointing, DeviceKind

if TYPE_CHECKING:
    from bytescale.train.parts.attached_model import HFModel

BYTES_PER_PARAMETER = 12
"""Of this machine's memory, while the model is built: weights, their copy in flat memory, and gradients."""


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model that runs on transformers' own code, as ``plan`` and ``simulate`` need it."""

    model: HFModel
    config: Config | None
    kind: DeviceKind

    def profile(self, rates: RatesConfig) -> Profile:
        """The times of a step, by counted operations."""
        from bytescale.attach.costs import Rates

        counted = Rates(
            flops_per_second=rates.flops,
            attention_flops_per_second=rates.attention_flops,
            launch_seconds=rates.launch,
            links=rates.links(),
        )
        ring_gradients = (self.config.trainer if self.config else TrainerConfig()).ring_gradients
        return self.model.profile(counted, ring_gradients)

    def devices(self, num_ranks: int, device_gib: float | None) -> AssumedDevices:
        """The devices of ``num_ranks`` HDP ranks; see ``cli.devices.devices_of``."""
        ring_gradients = (self.config.trainer if self.config else TrainerConfig()).ring_gradients
        usable = usable_bytes_of(self.config, self.kind) if device_gib is None else device_gib * GIB
        return AssumedDevices(
            memory=self.model.measured_memory(self.kind, num_ranks, ring_gradients),
            usable_bytes=usable,
        )


def planned_model(
    model: ModelConfig,
    config: Config | None,
    *,
    parallel: ParallelConfig,
    checkpointing: Checkpointing,
    cost_profile: str | None,
    longest: int,
) -> PlannedModel | None:
    """Build the model that ``model`` names; None if it is our own Llama or Mixtral.

    Args:
        model, config: as the command has them.
        parallel: tensor and pipeline parallelism, which only our own models have.
        checkpointing: which activations backward computes again.
        cost_profile: the profile that is asked for.
        longest: tokens of the longest sequence, for rotary positions that depend on it.

    Raises ``ConfigError`` if the model cannot be attached, does not fit into this machine, or lacks what is asked for.
    """
    if not model.preset.startswith((HF_PREFIX, CHECKPOINT_PREFIX)):
        return None
    architecture = resolve_model(model)
    if not isinstance(architecture, AttachedArchitecture):
        return None
    kind, element_bytes = kind_and_precision(config, "")
    base = config or Config()
    settings = replace(
        base,
        model=model,
        parallel=replace(base.parallel, tp=parallel.tp, pp=parallel.pp, virtual_stages=parallel.virtual_stages),
        cost=CostConfig(profile=cost_profile),
        data=replace(base.data, context_length=longest),
        trainer=replace(base.trainer, init="", checkpointing=checkpointing),
    )
    check_attached(settings, architecture)
    return PlannedModel(model=_build(settings, architecture, element_bytes), config=config, kind=kind)


def _build(config: Config, architecture: AttachedArchitecture, element_bytes: int) -> HFModel:
    import torch

    from bytescale.attach.folder import parameters_of
    from bytescale.attention import select_kernel
    from bytescale.train.parts.attached_model import build_attached_model
    from bytescale.train.parts.budget import machine_bytes

    number = sum(value.numel() for value in parameters_of(architecture.content).values())
    here = machine_bytes()
    if number * BYTES_PER_PARAMETER > here:
        raise ConfigError(
            problem(
                f"{config.model.preset} has {format_si(number)} parameters; it is built once to be planned for, which "
                f"takes {format_bytes(number * BYTES_PER_PARAMETER)}, and this machine has {format_bytes(here)}",
                so="it cannot be attached and measured here",
                fix="plan on a machine with more memory, or name a preset of about the same shape, such as 70b",
            )
        )
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[element_bytes]
    device = torch.device("cpu")
    kernel = select_kernel("auto", device, dtype)
    return build_attached_model(config, architecture, kernel, device=device, dtype=dtype, num_shards=1)
