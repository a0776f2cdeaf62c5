"""The order in which one pipeline stage runs its micro-batches: 1F1B, plain or interleaved.

The runtime runs exactly these actions and ``plan.pipeline_order`` proves that they cannot wait in a circle: both take
them from here. With v chunks of layers a rank (virtual stages), chunk c of stage s is part ``c p + s`` of the model's
``v p`` parts, and micro-batches go through all parts in turn::

    warm-up    forwards only: p - 1 - s of them; interleaved 2 (p - 1 - s) + (v - 1) (first round)
    steady     one forward, one backward, in turn
    cool-down  the backwards that are left

Forwards come micro-batch by micro-batch; interleaved in rounds of p micro-batches, a round through chunk 0, then
through chunk 1, and so on (Megatron-LM, Narayanan et al. 2021, section 2.2); the first round takes what is over (up to
2 p - 1), so that any number of micro-batches will do. Backwards take the same rounds with the chunks in reverse.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@lru_cache(maxsize=4096)
def stage_actions(num_micro_batches: int, num_stages: int, stage: int, num_chunks: int = 1) -> IntArray:
    """``[2 v m, 3]``: of each action in order whether it is a backward (0, 1), its chunk, and its micro-batch.

    Args:
        num_micro_batches: m of this pipeline; others may have more or fewer, or none.
        num_stages: p.
        stage: s, 0 reads the tokens.
        num_chunks: v.
    """
    forwards = _rounds(num_micro_batches, num_stages, num_chunks)
    backwards = forwards * [-1, 1] + [num_chunks - 1, 0]
    count = len(forwards)
    warm_up = num_stages - 1 - stage
    if num_chunks > 1:
        warm_up = 2 * warm_up + (num_chunks - 1) * _round_sizes(num_micro_batches, num_stages)[0]
    warm = min(warm_up, count)
    number = np.arange(count)
    order = np.empty((2 * count, 3), dtype=np.int64)
    order[np.where(number < warm, number, 2 * number - warm)] = np.insert(forwards, 0, 0, axis=1)
    order[np.where(number < count - warm, warm + 2 * number + 1, count + number)] = np.insert(backwards, 0, 1, axis=1)
    order.flags.writeable = False
    return order


def _round_sizes(num_micro_batches: int, num_stages: int) -> list[int]:
    """Rounds of p micro-batches, and what is left over in the first: a round of fewer behind full ones would hang."""
    full, over = divmod(num_micro_batches, num_stages)
    return [num_stages + over] + [num_stages] * (full - 1) if full else [num_micro_batches]


def _rounds(num_micro_batches: int, num_stages: int, num_chunks: int) -> IntArray:
    """``[v m, 2]`` chunk and micro-batch of each forward."""
    if num_chunks == 1:
        return np.stack([np.zeros(num_micro_batches, dtype=np.int64), np.arange(num_micro_batches)], axis=1)
    rounds, first = [], 0
    for size in _round_sizes(num_micro_batches, num_stages):
        rounds += [(chunk, first + number) for chunk in range(num_chunks) for number in range(size)]
        first += size
    return np.array(rounds, dtype=np.int64).reshape(-1, 2)
