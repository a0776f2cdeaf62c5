"""A rank's device: its kind, and how much of it may be used."""

from __future__ import annotations

import torch

from bytescale.common.environment import bytes_of_a_rank
from bytescale.common.units import GIBI
from bytescale.cost.memory.device_kernels import DeviceKind

SHARE = 0.92
"""Of a device: the rest is for libraries' workspaces and fragments."""


def kind_of(device: torch.device) -> DeviceKind:
    """Whose speeds and kernels to assume."""
    return "cuda" if device.type == "cuda" else "cpu"


def usable_device_bytes(device: torch.device, num_ranks: int, wanted_gib: float | None) -> float:
    """What one of ``num_ranks`` ranks may use: as wanted, or most of what there is. Ranks share the CPU's memory."""
    if wanted_gib is not None:
        return wanted_gib * GIBI
    if device.type == "cuda":
        return SHARE * torch.cuda.get_device_properties(device).total_memory
    return bytes_of_a_rank(SHARE, num_ranks)
