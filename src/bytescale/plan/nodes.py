"""Which parts of a plan's shared groups span several nodes. Nodes are runs of so many consecutive ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray


class Crossings(NamedTuple):
    """What leaves a node, by group. All arrays are ``[G]``."""

    columns: NDArray[np.bool_]  # whether any column of the group's grid does; of a ring: whether the group does
    rows: NDArray[np.bool_]  # whether any row does


def alignment(ranks: IntArray, sizes: IntArray, *, ranks_per_node: int) -> IntArray:
    """``[G]`` the largest runs of a group's members of which every one lies in a node, for members in rising order.

    It divides ``ranks_per_node``: the whole node for consecutive ranks that begin at a node, and 1 for scattered ranks.
    Runs of any divisor of it lie in nodes as well. ``ranks`` and ``sizes`` are those of ``crossings``.
    """
    starts = np.cumsum(sizes) - sizes
    steps = np.diff(ranks, prepend=0) == 1
    steps[starts] = True
    consecutive = np.logical_and.reduceat(steps, starts) if len(sizes) else np.zeros(0, dtype=bool)
    return np.where(consecutive, np.gcd(ranks[starts], ranks_per_node), 1)


def crossings(ranks: IntArray, sizes: IntArray, columns: IntArray, *, ranks_per_node: int) -> Crossings:
    """What leaves a node.

    Args:
        ranks: ``[E]`` members of all groups, group by group, in member order.
        sizes: ``[G]`` members of each group, at least 1.
        columns: ``[G]`` columns of each group's grid. Member ``p Q + q`` is in row p and column q.
        ranks_per_node: consecutive ranks that share a node.
    """
    if not len(sizes):
        return Crossings(np.zeros(0, dtype=bool), np.zeros(0, dtype=bool))
    starts = np.cumsum(sizes) - sizes
    node = ranks // ranks_per_node
    rings = node != np.repeat(node[starts], sizes)
    leaves = np.logical_or.reduceat(rings, starts)
    rows = np.zeros(len(sizes), dtype=bool)
    grids = np.flatnonzero((columns > 1) & leaves)
    for group in grids.tolist():
        start = int(starts[group])
        grid = node[start : start + int(sizes[group])].reshape(-1, int(columns[group]))
        leaves[group] = bool((grid != grid[0]).any())
        rows[group] = bool((grid != grid[:, :1]).any())
    return Crossings(leaves, rows)
