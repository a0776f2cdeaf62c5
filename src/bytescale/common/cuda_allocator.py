"""Sets a default for PyTorch's CUDA allocator, which reads its settings from the environment. Does not need torch."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the second is the newer name of the first


def use_expandable_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let PyTorch's CUDA allocator grow its segments, unless the user has set any of its options.

    The call has to come before torch is imported. Segments of fixed size would be fragmented, because micro-batches
    have many different lengths, and because a buffer cannot be reused while a message still uses it.
    """
    if not any(name in environment for name in _VARIABLES):
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
