"""Which kernels a run computes with: the implementation of attention.

It is chosen and tried before any data is read, so a missing kernel is reported before any work is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from bytescale.attention.flash import AttentionChoice, Heads, open_attention
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import Config


@contextmanager
def open_kernels(
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
    smallest: Callable[[Sequence[float]], Sequence[float]] = list,
) -> Iterator[AttentionChoice]:
    """The kernels of ``config``'s run, for the time of the block: PyTorch has one flash implementation a process.

    ``smallest``: takes this rank's numbers and returns the smallest of any rank. Raises ``ConfigError`` where something
    that is asked for is not there.
    """
    shape, tp = resolve_model(config.model), config.parallel.tp
    query_heads, key_heads, width = shape.heads
    heads = Heads(max(1, query_heads // tp), max(1, key_heads // tp), width, windowed=shape.has_windows)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or config.kernels.deterministic)
    try:
        with open_attention(config.kernels.attention, device, dtype, heads, smallest) as choice:
            yield choice
    finally:
        torch.use_deterministic_algorithms(before)
