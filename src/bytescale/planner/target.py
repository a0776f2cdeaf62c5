"""What to aim for: the time at which everybody could end together, and the degrees that a time asks for.

Shape letter: L sequences that may have to be shared, longest first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bytescale.cost import CostModel

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def block_seconds(cost: CostModel, lengths: IntArray, degrees: IntArray) -> FloatArray:
    """``[L]`` time of one sequence on ``degrees`` consecutive ranks; up to a node's ranks they stay inside a node."""
    lengths = np.asarray(lengths, dtype=np.float64)
    return cost.group_seconds(lengths, lengths * lengths, degrees, np.asarray(degrees) > cost.ranks_per_node)


def degrees_within(
    cost: CostModel, lengths: IntArray, fewest: IntArray, num_ranks: int, seconds: float
) -> tuple[IntArray, FloatArray]:
    """Fewest ranks on which each sequence ends within ``seconds``, and its time there, both ``[L]``.

    Compute falls with the degree, exposed traffic does not: start from what compute alone asks for, and add ranks for
    what the ring then takes, until nothing changes. A sequence that no degree ends in time keeps its last try.

    Args:
        cost: tells the time of a group.
        lengths: ``[L]`` tokens.
        fewest: ``[L]`` ranks that hold each sequence.
        num_ranks: R, the most that any may have.
        seconds: the time to keep.
    """
    work = cost.work_seconds(lengths)
    room = max(seconds - cost.micro_batch_seconds, 1e-3 * seconds)
    degrees = np.clip(np.ceil(work / room * (1 - 1e-12)), fewest, num_ranks).astype(np.int64)
    if is_ideal(cost):
        return degrees, work / degrees + cost.micro_batch_seconds
    for _ in range(8):
        taken = block_seconds(cost, lengths, degrees)
        late = taken > seconds * (1 + 1e-9)
        if not late.any():
            break
        left = np.maximum(room - (taken - cost.micro_batch_seconds - work / degrees), 0.05 * room)
        asked = np.maximum(np.ceil(work / left), degrees + 1)
        degrees = np.where(late, np.minimum(asked, num_ranks), degrees).astype(np.int64)
    fewer = block_seconds(cost, lengths, fewest)
    taken = block_seconds(cost, lengths, degrees)
    return np.where(fewer <= taken, fewest, degrees), np.minimum(fewer, taken)


def is_ideal(cost: CostModel) -> bool:
    """Whether communication is free."""
    return cost.ring_step_seconds == 0 and (
        cost.ring_bytes_per_token == 0
        or (np.isinf(cost.intra_node_bytes_per_second) and np.isinf(cost.inter_node_bytes_per_second))
    )


def target_seconds(
    cost: CostModel, long_lengths: IntArray, fewest: IntArray, local_seconds: float, num_ranks: int
) -> float:
    """The earliest end that spreading everything evenly allows, exposed communication included.

    The smallest T for which the ranks' time R T is as much as all sequences take: local ones ``local_seconds`` in sum,
    the others degree times time on the degree that T asks for. And never less than the longest sequence takes on
    its best degree.

    Args:
        cost: tells the time of a group.
        long_lengths: ``[L]`` sequences that may have to be shared.
        fewest: ``[L]`` ranks that hold each.
        local_seconds: time of all other sequences.
        num_ranks: R.
    """
    work = float(cost.work_seconds(long_lengths).sum())
    target = (work + local_seconds) / num_ranks
    if len(long_lengths) == 0:
        return target
    if is_ideal(cost) and cost.micro_batch_seconds == 0:
        return target
    degrees = np.arange(int(fewest[0]), num_ranks + 1)
    target = max(target, float(block_seconds(cost, np.full(len(degrees), long_lengths[0]), degrees).min()))
    for _ in range(4):
        degrees, seconds = degrees_within(cost, long_lengths, fewest, num_ranks, target)
        needed = (float((degrees * seconds).sum()) + local_seconds) / num_ranks
        if needed <= target * 1.001:
            break
        target = (target + needed) / 2
    return target
