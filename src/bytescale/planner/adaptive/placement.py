"""On which ranks the shared groups of a trial are.

Shape letters: G groups; E sum of their degrees; R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.planner.draft import consecutive

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Groups in the order in which ranks run them."""

    ranks: IntArray  # [E] members, group by group
    degrees: IntArray  # [G]
    free_at: FloatArray  # [R] seconds; when each rank has finished all of them

    @staticmethod
    def side_by_side(first: IntArray, degrees: IntArray, free_at: FloatArray) -> Placement:
        """Groups on consecutive ranks: ``first`` ``[G]`` is the first rank of each."""
        return Placement(ranks=consecutive(first, degrees), degrees=degrees, free_at=free_at)
