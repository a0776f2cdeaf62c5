"""Copies from host memory to a device for which the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """``host`` on ``device``: itself if it is there, else a copy that runs on the current stream.

    A copy from pageable memory makes the host wait until the device has done all its work. The pinned memory comes from
    PyTorch's caching allocator, which does not reuse it before the copy is done.
    """
    if device.type in ("cpu", "meta") or host.device.type != "cpu":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
