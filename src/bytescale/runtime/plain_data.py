"""Plain data between ranks, as JSON.

PyTorch's object collectives unpickle what arrives, so whoever gets between two ranks could run code in them.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from bytescale.runtime.group import answered

_CPU = torch.device("cpu")


def broadcast_json(value: Any, group: dist.ProcessGroup | None, source: int = 0, device: torch.device = _CPU) -> Any:
    """Return the ``value`` of the rank ``source`` of ``group``, on every rank. All ranks call it.

    Args:
        value: what ``json`` can write; ignored on the other ranks.
        group: None is a single rank, which gets its own ``value`` back.
        source: rank in the group.
        device: of the group's tensors: CUDA for NCCL.
    """
    if group is None or group.size() == 1:
        return value
    own = packed(value, device) if group.rank() == source else None
    length = torch.tensor([0 if own is None else own.numel()], device=device)
    with answered(f"rank {group.rank()} lost the others"):
        dist.broadcast(length, group=group, group_src=source)
        content = torch.zeros(int(length), dtype=torch.uint8, device=device) if own is None else own
        dist.broadcast(content, group=group, group_src=source)
        return value if own is not None else unpacked(content)


def all_gather_json(value: Any, group: dist.ProcessGroup | None, device: torch.device = _CPU) -> list[Any]:
    """Return every rank's ``value``, in rank order, on every rank. All ranks call it; arguments as above."""
    if group is None or group.size() == 1:
        return [value]
    own = packed(value, device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    with answered(f"rank {group.rank()} lost the others"):
        dist.all_gather(lengths, torch.tensor([own.numel()], device=device), group=group)
        padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8, device=device)
        padded[: own.numel()] = own
        rows = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(rows, padded, group=group)
        return [unpacked(row[: int(length)]) for row, length in zip(rows, lengths, strict=True)]


def packed(value: Any, device: torch.device = _CPU) -> torch.Tensor:
    """``value`` as JSON, ``[bytes]``."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def unpacked(content: torch.Tensor) -> Any:
    return json.loads(content.cpu().numpy().tobytes())
