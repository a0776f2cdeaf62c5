"""How many ranks a sequence takes to end within a given time, and how long it takes there.

Compute time falls with the number of ranks (the degree), but exposed communication does not. Groups that fit into a
node are assumed to stay in one.
Shape letter: L sequences that may have to be shared, longest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.cost import CostModel
from bytescale.cost.model import COLUMNS
from bytescale.planner.order import rising

FloatArray = NDArray[np.float64]

GRID = 96
"""Number of degrees tried, in geometric steps, for sequences for which the formula finds none."""


class Rectangles(NamedTuple):
    """The groups that are placed, widest first."""

    items: IntArray  # [G] which of the sequences
    degrees: IntArray  # [G] fewest ranks of each, descending
    seconds: FloatArray  # [G] time of each on so many ranks; infinite where that depends on the ranks
    grow: Callable[[int, int, int, float], tuple[int, float]]
    """``grow(group, first, most, room)`` is the fewest consecutive ranks, from ``first`` on and at most ``most``, on
    which the group ends within ``room`` seconds, and its time there. If none do, it is the fastest number of ranks; if
    ``most`` ranks cannot hold it, (0, infinity)."""
    speed: Sequence[float]  # [R + 1] sum of the speeds of the ranks before each
    node: int  # groups of at most this many ranks stay inside a node of so many; 1: nodes do not matter


def is_ideal(cost: CostModel) -> bool:
    """Whether communication is free."""
    return cost.latency_seconds(False) == cost.latency_seconds(True) == cost.ring_message_seconds == 0 and (
        cost.ring_bytes_per_token == 0
        or (np.isinf(cost.intra_node_bytes_per_second) and np.isinf(cost.inter_node_bytes_per_second))
    )


def block_seconds(cost: CostModel, lengths: IntArray, degrees: IntArray) -> FloatArray:
    """``[L]`` seconds of each sequence on ``degrees`` ranks, in their best shape."""
    lengths, degrees = np.asarray(lengths, dtype=np.float64), np.asarray(degrees)
    squares = cost.squares_of(lengths)
    exposed, _ = cost.best_shape(lengths, squares, degrees, degrees > cost.ranks_per_node)
    return cost.compute_seconds(lengths, squares, degrees) + exposed + cost.micro_batch_seconds


def divisible(cost: CostModel, degrees: IntArray) -> IntArray:
    """The next number of ranks, from each of ``degrees`` on, that can have several columns: a multiple of up to 8.

    A group that is wider than its compute needs costs traffic only, and a prime number of ranks is always a ring.
    """
    if cost.row_bytes_per_token is None:
        return degrees
    multiple = np.where(degrees >= 64, 8, np.where(degrees >= 16, 4, np.where(degrees >= 4, 2, 1)))
    return -(-degrees // multiple) * multiple


def degrees_within(
    cost: CostModel, lengths: IntArray, fewest: IntArray, num_ranks: int, seconds: float
) -> tuple[IntArray, FloatArray]:
    """Fewest ranks on which each sequence ends within ``seconds``, and its time there, both ``[L]``.

    Start from the degree that compute alone requires, and add ranks for the ring's exposed time. If that finds no
    degree, try a grid of degrees. A sequence that no degree ends in time takes its fastest degree.

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
    if (taken > limit).any():
        # Before more ranks than compute needs: a number of ranks that has more shapes.
        degrees = np.where(taken > limit, np.minimum(divisible(cost, degrees), num_ranks), degrees)
        taken = block_seconds(cost, lengths, degrees)
    for _ in range(4):
        if (taken <= limit).all():
            return degrees, taken
        left = np.maximum(room - (taken - cost.micro_batch_seconds - work / degrees), 0.05 * room)
        asked = divisible(cost, np.maximum(np.ceil(work / left), degrees + 1).astype(np.int64))
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
    degrees = divisible(cost, np.round(fewest[:, None] * steps).astype(np.int64))  # [L, GRID]
    degrees = np.minimum(degrees, num_ranks)
    taken = block_seconds(cost, lengths[:, None], degrees)
    chosen = np.where((taken <= seconds).any(axis=1), (taken <= seconds).argmax(axis=1), taken.argmin(axis=1))
    rows = np.arange(len(lengths))
    return degrees[rows, chosen], taken[rows, chosen]


def timer(cost: CostModel) -> Callable[[float, int, int], float]:
    """``block_seconds`` for one sequence, in plain floats: some 20 times as fast for a single value."""
    launch = cost.micro_batch_seconds
    if is_ideal(cost):
        return lambda work, length, degree: work / degree + launch
    near, far = cost.latency_seconds(False), cost.latency_seconds(True)
    message, squares = cost.ring_message_seconds, cost.attention_seconds_per_pair
    intra = cost.ring_bytes_per_token / cost.intra_node_bytes_per_second
    inter = cost.ring_bytes_per_token / cost.inter_node_bytes_per_second
    node, row = cost.ranks_per_node, cost.row_bytes_per_token
    row_intra = 0.0 if row is None else row / cost.intra_node_bytes_per_second
    row_inter = 0.0 if row is None else row / cost.inter_node_bytes_per_second

    def seconds_on(work: float, length: int, degree: int) -> float:
        leaves = degree > node
        transfer = inter * length / degree + far if leaves else intra * length / degree + near
        pairs = float(cost.squares_of(length)) if cost.windows else length * length
        block = squares * pairs / (degree * degree)
        exposed = (degree - 1) * (max(transfer - block, 0.0) + message)
        if row is None or exposed == 0.0:
            return work / degree + exposed + launch
        for columns in COLUMNS:
            if 2 * columns > degree:
                break
            if degree % columns:
                continue
            away = leaves and node % columns
            there = row_inter * length / degree + 2 * far if away else row_intra * length / degree + 2 * near
            around = (degree // columns - 1) * (max(transfer - columns * block, 0.0) + message)
            along = (columns - 1) * (max(there - 2 * block, 0.0) + 2 * message)
            exposed = min(exposed, around + along)
        return work / degree + exposed + launch

    return seconds_on


def grow(
    seconds_on: Callable[[float, int, int], float], work: float, length: int, degree: int, most: int, room: float
) -> tuple[int, float]:
    """The fewest ranks, more than ``degree`` and at most ``most``, that end within ``room`` seconds; the time there.

    If none do, the faster of ``degree`` and ``most`` ranks.
    """
    if room > 0:
        asked, beside_compute = degree, 0.0
        for _ in range(4):
            if beside_compute >= room:
                break
            asked = max(asked + 1, -int(-work // (room - beside_compute)))
            if asked > most:
                break
            height = seconds_on(work, length, asked)
            if height <= room * (1 + 1e-9):
                return asked, height
            beside_compute = height - work / asked
    fewest, all_of_it = seconds_on(work, length, degree), seconds_on(work, length, most)
    return (degree, fewest) if fewest <= all_of_it else (most, all_of_it)


def equal_blocks(lengths: IntArray, fewest: IntArray, num_ranks: int, cost: CostModel, longest: float) -> Rectangles:
    """The groups of ``lengths`` ``[L]`` on equal ranks, each on the fewest that end it within ``longest`` seconds.

    ``fewest`` ``[L]`` are the ranks that hold each.
    """
    degrees, seconds = degrees_within(cost, lengths, fewest, num_ranks, longest)
    order = rising(degrees.max(initial=1) - degrees)
    degrees, lengths = degrees[order], lengths[order]
    works, tokens, widths = cost.work_seconds(lengths).tolist(), lengths.tolist(), degrees.tolist()
    seconds_on, node = timer(cost), 1 if is_ideal(cost) else cost.ranks_per_node

    def wider(group: int, first: int, most: int, room: float) -> tuple[int, float]:
        del first  # equal ranks
        return grow(seconds_on, works[group], tokens[group], widths[group], most, room)

    return Rectangles(order, degrees, seconds[order], wider, range(num_ranks + 1), node)
