"""Fills gaps for which whole sequences are too long: short sequences are shared over the flat tops of blocks.

A block of D ranks leaves a gap of up to 1/D of the target, from its end to the target. A gap that is lower than the
shortest whole sequence stays empty. With few sequences per rank these gaps add up (github at 16,384 ranks: 940 blocks,
a shortest sequence of 8 % of the target, and 0.3 to 0.4 % of all time empty at the 110 blocks of more than 12 ranks
alone). A gap can be filled by one sequence, shared over all its ranks, whose time on one rank is width times height of
the gap.

Shape letters: P plateaus, F of them filled, L whole sequences, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.planner.adaptive.target import block_seconds
from bytescale.planner.adaptive.trial import Batch
from bytescale.planner.draft import consecutive

FloatArray = NDArray[np.float64]

LOW = 1.5
"""Gaps up to this many times the shortest sequence are filled (1 to 3 were tried: all keep to the target)."""


class Fillers(NamedTuple):
    """Sequences that were to stay whole and are now shared, one on each filled plateau."""

    places: IntArray  # [F] in the list of whole sequences
    first: IntArray  # [F] first rank
    degrees: IntArray  # [F]
    free_at: FloatArray  # [R] seconds; when each rank is free after them


def fill_gaps(batch: Batch, num_shared: int, free_at: FloatArray, target: float) -> Fillers:
    """Choose, for every low gap, the longest sequence that fits and is not taken yet.

    Args:
        batch: the batch; its sequences from ``num_shared`` on are whole, longest first.
        num_shared: number of sequences that are shared already.
        free_at: ``[R]`` seconds; when each rank has finished the shared ones.
        target: seconds; when all ranks should end.
    """
    seconds = batch.local_seconds[num_shared:]
    heads = np.flatnonzero(np.append(True, free_at[1:] != free_at[:-1]))
    widths = np.diff(np.append(heads, len(free_at)))
    gaps = target - free_at[heads]
    shortest = seconds[-1] if len(seconds) else np.inf
    low = np.flatnonzero((widths > 1) & (gaps > 0) & (gaps < LOW * shortest) & (gaps * widths >= shortest))
    low = low[np.argsort(-gaps[low] * widths[low], kind="stable")]
    # The longest sequence that fits. If several plateaus want the same one, they get it and the next shorter ones.
    number = np.arange(len(low))
    wanted = np.searchsorted(-seconds, -gaps[low] * widths[low], side="left")
    wanted = np.maximum.accumulate(wanted - number) + number
    low, wanted = low[wanted < len(seconds)], wanted[wanted < len(seconds)]

    first, degrees = heads[low], widths[low]
    taken = block_seconds(batch.cost, batch.lengths[num_shared + wanted], degrees)
    leaves_node = batch.cost.leaves_node(first, degrees) & (degrees <= batch.cost.ranks_per_node)
    fits = (taken <= gaps[low] * (1 + 1e-9)) & ~leaves_node
    places, first, degrees, taken = wanted[fits], first[fits], degrees[fits], taken[fits]
    free_at = free_at.copy()
    free_at[consecutive(first, degrees)] += np.repeat(taken, degrees)
    return Fillers(places=places, first=first, degrees=degrees, free_at=free_at)
