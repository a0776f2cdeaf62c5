"""The target: the time at which all ranks could end together. Also the degrees that a given time requires.

Shape letter: L sequences that may have to be shared, longest first.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.cost import CostModel

FloatArray = NDArray[np.float64]

PRECISION = 1.002
"""The target's lower and upper bound differ by at most this factor."""

GRID = 96
"""Number of degrees tried, in geometric steps, for sequences for which the formula finds none."""


def block_seconds(cost: CostModel, lengths: IntArray, degrees: IntArray) -> FloatArray:
    """``[L]`` seconds of each sequence on ``degrees`` consecutive ranks. Groups that fit into a node stay in one."""
    lengths = np.asarray(lengths, dtype=np.float64)
    return cost.group_seconds(lengths, lengths * lengths, degrees, np.asarray(degrees) > cost.ranks_per_node)


def degrees_within(
    cost: CostModel, lengths: IntArray, fewest: IntArray, num_ranks: int, seconds: float
) -> tuple[IntArray, FloatArray]:
    """Fewest ranks on which each sequence ends within ``seconds``, and its time there, both ``[L]``.

    Compute time falls with the degree, but exposed communication does not. So start from the degree that compute alone
    requires, and add ranks for the ring's exposed time. If that finds no degree, try a grid of degrees. A sequence that
    no degree ends in time takes its fastest degree.

    Args:
        cost: tells the time of a group.
        lengths: ``[L]`` tokens.
        fewest: ``[L]`` ranks that hold each sequence.
        num_ranks: R, the most that any may have.
        seconds: the time limit.
    """
    work = cost.work_seconds(lengths)
    room = max(seconds - cost.micro_batch_seconds, 1e-3 * seconds)
    degrees = np.clip(np.ceil(work / room * (1 - 1e-12)), fewest, num_ranks).astype(np.int64)
    if is_ideal(cost):
        return degrees, work / degrees + cost.micro_batch_seconds
    limit = seconds * (1 + 1e-9)
    taken = block_seconds(cost, lengths, degrees)
    for _ in range(4):
        if (taken <= limit).all():
            return degrees, taken
        left = np.maximum(room - (taken - cost.micro_batch_seconds - work / degrees), 0.05 * room)
        asked = np.maximum(np.ceil(work / left), degrees + 1)
        degrees = np.where(taken > limit, np.minimum(asked, num_ranks), degrees).astype(np.int64)
        taken = block_seconds(cost, lengths, degrees)
    late = np.flatnonzero(taken > limit)
    degrees[late], taken[late] = _best_on_grid(cost, lengths[late], fewest[late], num_ranks, seconds)
    return degrees, taken


def _best_on_grid(
    cost: CostModel, lengths: IntArray, fewest: IntArray, num_ranks: int, seconds: float
) -> tuple[IntArray, FloatArray]:
    """``degrees_within`` for sequences near their shortest possible time: try ``GRID`` degrees from fewest to all."""
    steps = (num_ranks / fewest[:, None]) ** (np.arange(GRID) / (GRID - 1))
    degrees = np.minimum(np.round(fewest[:, None] * steps), num_ranks).astype(np.int64)  # [L, GRID]
    taken = block_seconds(cost, lengths[:, None], degrees)
    chosen = np.where((taken <= seconds).any(axis=1), (taken <= seconds).argmax(axis=1), taken.argmin(axis=1))
    rows = np.arange(len(lengths))
    return degrees[rows, chosen], taken[rows, chosen]


def is_ideal(cost: CostModel) -> bool:
    """Whether communication is free."""
    return cost.ring_step_seconds == cost.ring_message_seconds == 0 and (
        cost.ring_bytes_per_token == 0
        or (np.isinf(cost.intra_node_bytes_per_second) and np.isinf(cost.inter_node_bytes_per_second))
    )


def target_seconds(
    cost: CostModel, long_lengths: IntArray, fewest: IntArray, local_seconds: float, num_ranks: int
) -> float:
    """The earliest makespan if all work could be spread evenly, exposed communication included.

    It is the smallest T for which the time of all ranks, R T, is as much as all sequences take. Local sequences take
    ``local_seconds`` in sum; each other one takes its degree times its time, on the degree that T requires. T is never
    less than the time of the longest sequence on its fastest degree.

    Args:
        cost: tells the time of a group.
        long_lengths: ``[L]`` sequences that may have to be shared.
        fewest: ``[L]`` ranks that hold each.
        local_seconds: sum of the times of all other sequences.
        num_ranks: R.
    """
    work = float(cost.work_seconds(long_lengths).sum())
    target = (work + local_seconds) / num_ranks
    if len(long_lengths) == 0:
        return target
    if is_ideal(cost) and cost.micro_batch_seconds == 0:
        return target
    every = np.arange(int(fewest[0]), num_ranks + 1)
    target = max(target, float(block_seconds(cost, np.full(len(every), long_lengths[0]), every).min()))

    def needed(seconds: float) -> float:
        degrees, taken = degrees_within(cost, long_lengths, fewest, num_ranks, seconds)
        return (float((degrees * taken).sum()) + local_seconds) / num_ranks

    too_early, enough = target, needed(target)
    while enough > PRECISION * too_early:
        middle = math.sqrt(too_early * enough)
        if needed(middle) <= middle:
            enough = middle
        else:
            too_early = middle
    return max(enough, target)
