"""Which layers each pipeline stage has, in one chunk or, interleaved, in several."""

from __future__ import annotations

from bytescale.config import Architecture
from bytescale.cost import flops


def split_layers(architecture: Architecture, num_parts: int) -> list[range]:
    """A contiguous range of layers for each part, in order, at least one each, by equal work.

    The last part also has the output head, which counts as many layers as it has operations per token (attention's
    share, which grows with the sequence, is left out: that would only make layers count for more). Looking up the
    embedding is no work. Of parts with equal work the later ones take more layers, as 1F1B makes the earlier ones keep
    more micro-batches.

    Raises ``ValueError`` for more parts than layers (``config.validate`` says it better, and earlier).
    """
    num_layers = architecture.num_layers
    if not 1 <= num_parts <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be split into {num_parts} parts")
    load = [0.0] * num_parts
    load[-1] = flops.head_flops_per_token(architecture) / flops.layer_linear_flops_per_token(architecture)
    counts = [1] * num_parts
    for _ in range(num_layers - num_parts):
        least = min(range(num_parts), key=lambda part: (load[part] + counts[part], -part))
        counts[least] += 1
    starts = [sum(counts[:part]) for part in range(num_parts)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def stage_chunks(architecture: Architecture, num_stages: int, stage: int, virtual_stages: int = 1) -> list[range]:
    """Layers of each of a stage's ``virtual_stages`` chunks: of the model's v p parts every p-th, from its own on."""
    return split_layers(architecture, num_stages * virtual_stages)[stage::num_stages]
