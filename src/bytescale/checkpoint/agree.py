"""Errors that all ranks raise together: a rank that met none would wait for the others for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from bytescale.checkpoint.manifest import CheckpointDamage
from bytescale.common.errors import BytescaleError, CheckpointError, ConfigError, DiskFullError
from bytescale.runtime.plain_data import broadcast_json

_KINDS: dict[str, type[BytescaleError]] = {
    kind.__name__: kind for kind in (CheckpointError, CheckpointDamage, DiskFullError, ConfigError)
}


@contextmanager
def together(group: dist.ProcessGroup) -> Iterator[None]:
    """What one rank raises in the block, all ranks raise behind it: the error of the lowest rank that has one.

    All ranks come here, also those that have nothing to do in the block.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    first = torch.tensor([group.rank() if error is not None else group.size()])
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    source = int(first)
    if source == group.size():
        return
    if error is not None and source == group.rank():
        broadcast_json([type(error).__name__, str(error)], group, source)
        raise error
    kind, text = broadcast_json(None, group, source)
    raise _KINDS.get(kind, CheckpointError)(text) from error
