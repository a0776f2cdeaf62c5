"""Environment variables: what torchrun tells a process, and what PyTorch is told. Does not need torch."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the second is the newer name of the first


def ranks_of_torchrun() -> int | None:
    """How many ranks torchrun, or anything that speaks its variables, started in all; None when it started none."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def use_expandable_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let PyTorch's CUDA allocator grow its segments, unless the user has set any of its options.

    The call has to come before torch is imported. Segments of fixed size would be fragmented, because micro-batches
    have many different lengths, and because a buffer cannot be reused while a message still uses it.
    """
    if not any(name in environment for name in _ALLOCATOR_VARIABLES):
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
