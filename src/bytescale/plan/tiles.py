"""How much of a shared group's attention each member computes: its tile of the grid."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray


class Shares(NamedTuple):
    """What parts of its group a member has. All arrays are ``[E]``, group by group in member order."""

    own: FloatArray  # of the tokens: those of its slice
    row: FloatArray  # of the tokens: those of its row, whose queries it computes
    column: FloatArray  # of the tokens: those of its column, whose keys it computes

    @property
    def tile(self) -> FloatArray:
        """Of the pairs of query and key. Of a ring, and of equal members, it is as much as of the tokens.

        Two slices of n and m tokens have 2 n m visible pairs, whichever members hold them (``plan.layout``).
        """
        return self.row * self.column


def shares_of(weights: IntArray, sizes: IntArray, columns: IntArray) -> Shares:
    """The members' shares.

    Args:
        weights: ``[E]`` of the members of all groups, group by group in member order.
        sizes: ``[G]`` members of each group.
        columns: ``[G]`` columns of its grid. Member ``p Q + q`` is in row p and column q.
    """
    starts = np.cumsum(sizes) - sizes
    own = weights / np.repeat(np.add.reduceat(weights, starts) if len(sizes) else weights, sizes)
    first, across = np.repeat(starts, sizes), np.repeat(columns, sizes)
    place = np.arange(len(own)) - first
    return Shares(own, _sums(first + place - place % across, own), _sums(first + place % across, own))


def _sums(heads: IntArray, values: FloatArray) -> FloatArray:
    """For each member, the sum of ``values`` over all members with the same head."""
    return np.bincount(heads, weights=values, minlength=len(values)).astype(np.float64)[heads]
