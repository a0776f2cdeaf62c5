"""The default for CUDA's caching allocator, which reads its settings from the environment. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the second is the newer name of the first


def use_expandable_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let CUDA's allocator grow its segments, unless the user has set any option of it. Call before torch is imported.

    Micro-batches of every length leave gaps in segments of fixed size, and buffers that a message still uses cannot be
    reused at once.
    """
    if not any(name in environment for name in _VARIABLES):
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
