"""Errors that all ranks raise together: a rank that met none would wait for the others for ever."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from bytescale.checkpoint.manifest import CheckpointDamage
from bytescale.common.errors import BytescaleError, CheckpointError, ConfigError, DiskFullError

_KINDS: dict[str, type[BytescaleError]] = {
    kind.__name__: kind for kind in (CheckpointError, CheckpointDamage, DiskFullError, ConfigError)
}


def settle(error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise if any rank has an error: on every rank that of the lowest rank that has one. All ranks call it."""
    if group is None or group.size() == 1:
        if error is not None:
            raise error
        return
    first = torch.tensor([group.rank() if error is not None else group.size()])
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    source = int(first)
    if source == group.size():
        return
    if error is not None and source == group.rank():
        share_text(f"{type(error).__name__}\n{error}", group, source)
        raise error
    kind, _, text = share_text("", group, source).partition("\n")
    raise _KINDS.get(kind, CheckpointError)(text) from error


def share_text(text: str, group: dist.ProcessGroup | None, source: int = 0) -> str:
    """The text of the rank ``source``, on every rank. All ranks call it."""
    if group is None or group.size() == 1:
        return text
    own = text.encode() if group.rank() == source else b""
    length = torch.tensor([len(own)])
    dist.broadcast(length, group=group, group_src=source)
    if not int(length):
        return ""
    content = torch.zeros(int(length), dtype=torch.uint8)
    if own:
        content = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    dist.broadcast(content, group=group, group_src=source)
    return content.numpy().tobytes().decode()


def attempt(action: Callable[[], None]) -> Exception | None:
    """The error of ``action``, for ``settle``."""
    try:
        action()
    except (OSError, BytescaleError) as error:
        return error
    return None
