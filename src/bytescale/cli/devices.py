"""The devices that ``plan`` and ``simulate`` count on: those that ``train`` would run the config on, and their memory.

Without a config: of the kind that the profile was measured on, else GPUs in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

from bytescale.common.errors import ConfigError, problem
from bytescale.common.units import format_bytes
from bytescale.config import AUTO_CAPACITY, AUTO_HEAD_GROUPS, Config
from bytescale.config.validate import may_offload
from bytescale.cost import Profile
from bytescale.cost.curve import Curve
from bytescale.cost.memory import Checkpointing, DeviceKind, MemoryModel

GIB = 2**30
ASSUMED_GIB = 80.0  # of a GPU that is not here
_ELEMENT_BYTES = {"bf16": 2, "bfloat16": 2, "fp32": 4, "float32": 4, "fp64": 8, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What a rank's fullest device holds."""

    memory: MemoryModel
    """Of the pipeline's fullest stage."""
    usable_bytes: float

    def capacity_tokens(self, wanted: int) -> int:
        """``wanted`` tokens, or for "auto" what fits. Raises ``ConfigError`` when nothing does."""
        if wanted != AUTO_CAPACITY:
            return wanted
        capacity = self.memory.capacity_tokens(self.usable_bytes)
        if capacity == 0:
            states = max(stage.states_bytes + stage.nccl_bytes for stage in self.memory.stages())
            raise ConfigError(
                problem(
                    f"{'NCCL, ' if self.memory.nccl_bytes else ''}parameters, gradients and optimizer need "
                    f"{format_bytes(states)} a device, of "
                    f"{format_bytes(self.usable_bytes)}",
                    so="not one token would fit beside them",
                    fix="use more devices per rank (tp, pp), more ranks, or a larger device_gib",
                )
            )
        return capacity

    def kept_by(self, profile: Profile) -> Profile:
        """``profile`` with what a layer keeps under checkpointing: profiles are taken without."""
        if self.memory.checkpointing == "none":
            return profile
        return replace(profile, activation_bytes=Curve(0.0, self.memory.layer_saved_bytes_per_token, 0.0))


def devices_of(
    config: Config | None,
    profile: Profile,
    *,
    num_ranks: int,
    num_stages: int,
    virtual_stages: int,
    checkpointing: Checkpointing,
    capacity_tokens: int,
    device_gib: float | None,
) -> Devices:
    """The devices of ``num_ranks`` HDP ranks that run ``profile``'s model; see the top of this file.

    ``capacity_tokens``: that they have to hold, or "auto". ``device_gib``: GiB of a device that may be used; None: as
    much as training would use here, or ``ASSUMED_GIB``.
    """
    kind, element_bytes = _kind_and_precision(config, profile)
    usable_bytes = _usable_bytes(config, kind) if device_gib is None else device_gib * GIB
    model = MemoryModel.on_device(
        profile.architecture,
        kind,
        element_bytes=element_bytes,
        num_ranks=num_ranks,
        checkpointing=checkpointing,
        attention="auto" if config is None else config.trainer.attention,
        head_groups=1 if config is None else config.trainer.head_groups or 1,
        tensor_parallel=profile.tensor_parallel,
        num_stages=num_stages,
        virtual_stages=virtual_stages,
        ring_gradients="wide" if config is None else config.trainer.ring_gradients,
    )
    if config is None or config.trainer.head_groups == AUTO_HEAD_GROUPS:
        offload = config is not None and may_offload(config, kind)
        model = model.in_head_groups(usable_bytes, capacity_tokens=capacity_tokens or None, offload=offload)
    return Devices(memory=model.fullest_stage(usable_bytes), usable_bytes=usable_bytes)


def _kind_and_precision(config: Config | None, profile: Profile) -> tuple[DeviceKind, int]:
    """Kind of device, and bytes of a number."""
    name, _, measured_dtype = profile.device.partition(", ")
    measured: DeviceKind = "cpu" if name == "cpu" else "cuda"
    if config is None:
        return measured, _ELEMENT_BYTES.get(measured_dtype, 2)
    kind, dtype = config.trainer.device, config.trainer.dtype
    if kind == "auto":
        kind = measured if profile.device else _kind_here()
    return kind, (2 if kind == "cuda" else 4) if dtype == "auto" else _ELEMENT_BYTES[dtype]


def _kind_here() -> DeviceKind:
    """What ``auto`` is for training on this machine. Where torch is not installed nothing trains: then a GPU."""
    if find_spec("torch") is None:
        return "cuda"
    from bytescale.train.ranks import choose_device

    return "cuda" if choose_device("auto", 0, 1).type == "cuda" else "cpu"


def _usable_bytes(config: Config | None, kind: DeviceKind) -> float:
    """What a config's training may use of a device of this machine; ``ASSUMED_GIB`` where it cannot run here."""
    if config is None or find_spec("torch") is None or (kind == "cuda" and _kind_here() == "cpu"):
        return ASSUMED_GIB * GIB
    import torch

    from bytescale.train.memory import usable_device_bytes

    return usable_device_bytes(config, torch.device(kind), config.parallel.ranks)
