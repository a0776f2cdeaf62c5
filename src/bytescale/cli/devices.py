"""The devices that ``plan`` and ``simulate`` assume, and their memory.

With a config, these are the devices on which ``train`` would run it. Without one, they are of the kind on which the
profile was measured, or GPUs in bf16 if nothing was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

from bytescale.config import AUTO_CAPACITY, AUTO_HEAD_GROUPS, Config
from bytescale.config.validate import may_offload
from bytescale.cost import Profile
from bytescale.cost.curve import Curve
from bytescale.cost.memory import Checkpointing, DeviceKind, MeasuredMemory, MemoryModel, ModelShare, fitting_capacity

GIB = 2**30
ASSUMED_GIB = 80.0  # memory of a GPU that this machine does not have
_ELEMENT_BYTES = {"bf16": 2, "bfloat16": 2, "fp32": 4, "float32": 4, "fp64": 8, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedDevices:
    """The memory of the fullest device of a rank."""

    memory: MemoryModel | MeasuredMemory
    """The memory model of the pipeline's fullest stage."""
    usable_bytes: float

    def capacity_tokens(self, wanted: int) -> int:
        """Return ``wanted``, or for "auto" the number of tokens that fit. Raises ``ConfigError`` if none fits."""
        return wanted if wanted != AUTO_CAPACITY else fitting_capacity(self.memory, wanted, self.usable_bytes)

    def kept_by(self, profile: Profile) -> Profile:
        """Return ``profile`` with what a layer keeps under checkpointing. Profiles are measured without it."""
        if isinstance(self.memory, MeasuredMemory) or self.memory.checkpointing == "none":
            return profile  # rows of attached models are measured under their checkpointing
        return replace(profile, activation_bytes=Curve(0.0, self.memory.layer_saved_bytes_per_token, 0.0))


def devices_of(
    config: Config | None,
    profile: Profile,
    share: ModelShare,
    *,
    num_ranks: int,
    checkpointing: Checkpointing,
    capacity_tokens: int,
    device_gib: float | None,
) -> AssumedDevices:
    """Return the devices of ``num_ranks`` HDP ranks that run a model by ``profile`` (see the top of this file).

    ``share``: the model, and how tensor parallelism and a pipeline cut it.
    ``capacity_tokens``: the tokens that a micro-batch has to hold, or "auto". ``device_gib``: GiB of a device that may
    be used. None: as much as training would use on this machine, or ``ASSUMED_GIB``.
    """
    kind, element_bytes = kind_and_precision(config, profile.device)
    usable_bytes = usable_bytes_of(config, kind) if device_gib is None else device_gib * GIB
    model = MemoryModel.on_device(
        share,
        kind,
        element_bytes=element_bytes,
        num_ranks=num_ranks,
        checkpointing=checkpointing,
        attention="auto" if config is None else config.trainer.attention,
        ring_gradients="wide" if config is None else config.trainer.ring_gradients,
    )
    if config is None or config.trainer.head_groups == AUTO_HEAD_GROUPS:
        offload = config is not None and may_offload(config, kind)
        model = model.in_head_groups(usable_bytes, capacity_tokens=capacity_tokens or None, offload=offload)
    else:
        model = replace(model, head_groups=config.trainer.head_groups)
    return AssumedDevices(memory=model.fullest_stage(usable_bytes), usable_bytes=usable_bytes)


def kind_and_precision(config: Config | None, measured_on: str) -> tuple[DeviceKind, int]:
    """Return the kind of device, and the bytes of a number in the compute dtype.

    ``measured_on``: the device of the profile (``Profile.device``); empty without a measured one.
    """
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


def usable_bytes_of(config: Config | None, kind: DeviceKind) -> float:
    """Return the bytes of a device that training may use here, or ``ASSUMED_GIB`` if the config cannot run here."""
    if config is None or find_spec("torch") is None or (kind == "cuda" and _kind_here() == "cpu"):
        return ASSUMED_GIB * GIB
    import torch

    from bytescale.train.parts.budget import usable_device_bytes

    return usable_device_bytes(config, torch.device(kind), config.parallel.ranks)
