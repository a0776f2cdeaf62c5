"""Which layers each pipeline stage has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from bytescale.common.errors import ConfigError
from bytescale.config.architecture import Architecture
from bytescale.cost import flops


def split_layers(architecture: Architecture, num_stages: int) -> list[range]:
    """A contiguous range of layers for each stage, in order, with about equal work and at least one layer each.

    The last stage also has the output head, which counts as a number of layers, by its operations per token without
    attention. Of stages with equal work the later ones take more layers, because under 1F1B the earlier ones keep the
    activations of more micro-batches.

    Raises ``ConfigError`` for more stages than layers.
    """
    num_layers = architecture.num_layers
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"parallel.pp = {num_stages} exceeds the model's {num_layers} layers",
            so="a stage would have no layer",
            fix=f"use at most {num_layers} stages",
        )
    load = [0.0] * num_stages
    load[-1] = 2 * flops.head_parameters(architecture) / flops.layer_linear_flops_per_token(architecture)
    counts = [1] * num_stages
    for _ in range(num_layers - num_stages):
        least = min(range(num_stages), key=lambda stage: (load[stage] + counts[stage], -stage))
        counts[least] += 1
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def split_costs(costs: Sequence[float], head: float, num_stages: int) -> list[range]:
    """The same for layers of unequal ``costs``: the sum over stages of (its cost) ** 8, nearly the largest, is least.

    ``head``: what the last stage has in addition, in the same unit. There are at most as many stages as layers.
    """
    sums = [0.0, *accumulate(costs)]
    total = sums[-1] + head
    best: list[tuple[float, list[int]]] = [(0.0 if end == 0 else math.inf, [0]) for end in range(len(costs) + 1)]
    for stage in range(num_stages):
        extra, found = head * (stage == num_stages - 1), []
        for end in range(len(costs) + 1):
            chosen = (math.inf, [0])
            for start in range(stage, end):  # the earliest start leaves the fewest layers to the stages before
                value = best[start][0] + ((sums[end] - sums[start] + extra) / total) ** 8
                if value < chosen[0] * (1 - 1e-9):
                    chosen = value, [*best[start][1], end]
            found.append(chosen)
        best = found
    return [range(start, stop) for start, stop in pairwise(best[-1][1])]
