"""Which layers each pipeline stage has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise


def split_costs(costs: Sequence[float], head: float, num_stages: int) -> list[range]:
    """A contiguous range of layers for each stage, in order, with at least one layer each, by the layers' ``costs``.

    The sum over stages of (its cost) ** 8 is least, nearly the largest cost. Of stages with equal work the later ones
    take more layers, because under 1F1B the earlier ones keep the activations of more micro-batches.

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
