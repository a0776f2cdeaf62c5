"""The order in which one pipeline stage runs its micro-batches: 1F1B, plain or interleaved.

The runtime runs exactly these actions, the simulator times them, and ``plan.pipeline_order`` proves that they cannot
wait in a circle: all take them from here. With v chunks of layers a rank (virtual stages), chunk c of stage s is part
``c p + s`` of the model's ``v p`` parts, and micro-batches go through all parts in turn::

    warm-up    forwards only: p - 1 - s of them; interleaved 2 (p - 1 - s) + (v - 1) p
    steady     one forward, one backward, in turn
    cool-down  the backwards that are left

Forwards come micro-batch by micro-batch; interleaved in rounds of p micro-batches, a round through chunk 0, then
through chunk 1, and so on (Megatron-LM, Narayanan et al. 2021, section 2.2). Backwards take the same rounds with the
chunks in reverse.

Interleaved rounds have to be full, and pipelines that share a group have to go through the same ones, but each has its
own number of micro-batches. So all follow the order of the pipeline that has most, rounded up to whole rounds, and skip
what they do not have. Leaving actions out of an order that does not hang leaves one that does not hang.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@lru_cache(maxsize=4096)
def stage_actions(num_micro_batches: int, num_stages: int, stage: int, num_chunks: int = 1, most: int = 0) -> IntArray:
    """``[2 v m, 3]``: of each action in order whether it is a backward (0, 1), its chunk, and its micro-batch.

    Args:
        num_micro_batches: m of this pipeline; others may have more or fewer, or none.
        num_stages: p.
        stage: s, 0 reads the tokens.
        num_chunks: v.
        most: micro-batches of the pipeline that has most of them; matters for v > 1.
    """
    warm_up = num_stages - 1 - stage
    if num_chunks == 1:
        return _one_forward_one_backward(_in_turn(num_micro_batches), 1, warm_up)
    num_rounds = -(-max(num_micro_batches, most) // num_stages)
    forwards = _rounds(num_rounds, num_stages, num_chunks)
    order = _one_forward_one_backward(forwards, num_chunks, 2 * warm_up + (num_chunks - 1) * num_stages)
    return order[order[:, 2] < num_micro_batches]


def _one_forward_one_backward(forwards: IntArray, num_chunks: int, warm_up: int) -> IntArray:
    """The actions, from the forwards ``[n, 2]`` (chunk, micro-batch) in their order."""
    backwards = forwards * [-1, 1] + [num_chunks - 1, 0]
    count = len(forwards)
    warm = min(warm_up, count)
    number = np.arange(count)
    order = np.empty((2 * count, 3), dtype=np.int64)
    order[np.where(number < warm, number, 2 * number - warm)] = np.insert(forwards, 0, 0, axis=1)
    order[np.where(number < count - warm, warm + 2 * number + 1, count + number)] = np.insert(backwards, 0, 1, axis=1)
    order.flags.writeable = False
    return order


def _in_turn(num_micro_batches: int) -> IntArray:
    return np.stack([np.zeros(num_micro_batches, dtype=np.int64), np.arange(num_micro_batches)], axis=1)


def _rounds(num_rounds: int, num_stages: int, num_chunks: int) -> IntArray:
    """``[v p num_rounds, 2]`` chunk and micro-batch of each forward."""
    turn, chunk, place = np.indices((num_rounds, num_chunks, num_stages)).reshape(3, -1)
    return np.stack([chunk, turn * num_stages + place], axis=1)
