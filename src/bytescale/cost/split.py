"""Which layers each pipeline stage has: one chunk of layers, or several with interleaving."""

from __future__ import annotations

from bytescale.config import Architecture
from bytescale.cost import flops


def split_layers(architecture: Architecture, num_parts: int) -> list[range]:
    """A contiguous range of layers for each part, in order, with about equal work and at least one layer each.

    The last part also has the output head, which counts as a number of layers, by its operations per token without
    attention. Of parts with equal work the later ones take more layers, because under 1F1B the earlier ones keep the
    activations of more micro-batches.

    Raises ``ValueError`` for more parts than layers (``config.validate`` rejects this earlier, with a better message).
    """
    num_layers = architecture.num_layers
    if not 1 <= num_parts <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be split into {num_parts} parts")
    load = [0.0] * num_parts
    load[-1] = 2 * flops.head_parameters(architecture) / flops.layer_linear_flops_per_token(architecture)
    counts = [1] * num_parts
    for _ in range(num_layers - num_parts):
        least = min(range(num_parts), key=lambda part: (load[part] + counts[part], -part))
        counts[least] += 1
    starts = [sum(counts[:part]) for part in range(num_parts)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def stage_chunks(architecture: Architecture, num_stages: int, stage: int, virtual_stages: int = 1) -> list[range]:
    """Layers of each chunk of a stage. Of the model's v p parts, stage s has parts s, s + p, s + 2 p and so on."""
    return split_layers(architecture, num_stages * virtual_stages)[stage::num_stages]
