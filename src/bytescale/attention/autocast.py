"""Autocast around attention and losses, whose kernels choose the dtypes of their products themselves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off for the time of the block. Some devices (meta) have none."""
    return torch.autocast(device.type, enabled=False) if _is_on(device.type) else nullcontext()


def in_autocast(rows: Tensor) -> Tensor:
    """The rows in the dtype in which autocast, where it is on, would have computed a product. fp64 stays."""
    device = rows.device.type
    is_cast = rows.dtype != torch.float64 and _is_on(device)
    return rows.to(torch.get_autocast_dtype(device)) if is_cast else rows


def _is_on(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
