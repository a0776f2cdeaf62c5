"""Which kernels a run computes with: the implementation of attention.

It is chosen and tried before any data is read, so a missing kernel is reported before any work is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from bytescale.attention.flash import AttentionChoice, Heads, open_attention
from bytescale.common.errors import ConfigError
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import Config
from bytescale.hf.files.folder import empty_model, make_model
from bytescale.hf.model.counting import OnMeta
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.probe import heads_of


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
    content = resolve_model(config.model).content
    heads = heads_of_rank(content, dtype, config.parallel.tp) if device.type == "cuda" else None
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or config.kernels.deterministic)
    try:
        with open_attention(config.kernels.attention, device, dtype, heads, smallest) as choice:
            yield choice
    finally:
        torch.use_deterministic_algorithms(before)


def heads_of_rank(content: dict[str, Any], dtype: torch.dtype, tp: int) -> Heads | None:
    """The heads of one of ``tp`` ranks, as the probe sees them in the model's layers; None: it has no attention."""
    try:
        with OnMeta():
            found = heads_of(HFDecoder(empty_model(content).to(dtype)).structure)
    except (RuntimeError, ConfigError):  # a model whose code looks at numbers has to be made as a whole
        found = heads_of(HFDecoder(make_model(content, dtype)).structure)
    return found and replace(found, queries=max(1, found.queries // tp), keys=max(1, found.keys // tp))
