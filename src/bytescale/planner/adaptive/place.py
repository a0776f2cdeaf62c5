"""Places the shared groups, widest first: stacked, or reserved in several orders (``free``).

Where too few groups are narrow enough for the strips beside the longest ones, stacked groups end late, and groups are
reserved. The group that grew at the greatest cost, or was late all the same, moves a little earlier in the order, and
all groups are placed again, until no group grows much or ``ORDERS`` orders were tried ("squeaky wheel" optimisation).

Shape letters: G groups, n whole sequences.
"""

from __future__ import annotations

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.cost.model import CostModel
from bytescale.planner.adaptive.degrees import Rectangles, block_seconds
from bytescale.planner.adaptive.effort import LITTLE, LOOKS, LOW, ORDERS, STEPS_UP
from bytescale.planner.adaptive.fill import into_holes
from bytescale.planner.adaptive.free import FreeTime, Placement


def stack(
    blocks: Rectangles, num_ranks: int, *, target: float, num_stages: int = 1, whole_slot: float = 0.0
) -> FreeTime:
    """All groups, stacked to end by ``target`` seconds; ``whole_slot``: share of a slot's speed."""
    free = FreeTime(blocks, num_ranks, target, num_stages)
    for group in range(len(blocks.items)):
        free.stack(group, whole_slot)
    return free


def share_low(free: FreeTime, lengths: IntArray, seconds: FloatArray, cost: CostModel) -> None:
    """Share short sequences over slots whose gap up to the target is too low for any whole one.

    A block of D ranks leaves a gap of up to 1/D of the target, and with few sequences per rank these gaps add up. Each
    gets the longest sequence that fits and is not taken yet. Sequence k becomes group G + k.

    ``lengths [n]`` are tokens of the whole sequences, descending, and ``seconds [n]`` the time of each on one rank.
    """
    if not len(seconds):
        return
    free.unite()
    low = [gap for gap in free.gaps if gap[2] > 1 and 0 < free.target - gap[0] < LOW * seconds[-1]]
    holes = into_holes(seconds, np.array([(free.target - gap[0]) * gap[2] for gap in low]), one_each=True)
    shared = np.flatnonzero(holes >= 0)
    gaps = [low[hole] for hole in holes[shared].tolist()]
    widths = np.array([gap[2] for gap in gaps], dtype=np.int64)
    heights = block_seconds(cost, lengths[shared], widths)
    for number, gap, height in zip(shared.tolist(), gaps, heights.tolist(), strict=True):
        start, first, width, *_ = gap
        leaves_node = width <= cost.ranks_per_node and cost.leaves_node(first, width)
        if start + height <= free.target + free.same and not leaves_node:
            free.take(len(free.degrees) + number, start, start + height, height, [(free.gaps.index(gap), width)])


def reserve(
    blocks: Rectangles,
    lengths: IntArray,
    *,
    num_ranks: int,
    target: float,
    whole_seconds: FloatArray,
    launch_seconds: float = 0.0,
) -> Placement | None:
    """The placement with the least traffic of those found that end in time.

    If none does, groups are placed widest first, each as early as it fits. None: even that takes too long to find.

    Args:
        blocks: the groups, on equal ranks.
        lengths: ``[G]`` tokens of each.
        target: seconds; the time by which all should end.
        whole_seconds: ``[n]`` time of each other sequence, descending. A placement is in time only if these fit as
            well: after the shared groups or, if that room is too small, also in the gaps before them.
        launch_seconds: g, the fixed time of a micro-batch, which each of these gaps loses.
    """
    order, fewest = list(range(len(lengths))), float((lengths * (blocks.degrees - 1)).sum())
    best, least, looks = None, np.inf, 0
    for turn in range(ORDERS):
        free = FreeTime(blocks, num_ranks, target)
        late = next((own for own in order if looks + free.looks > LOOKS or not free.reserve(own, target)), None)
        looks += free.looks
        if late is None:
            extra = [
                int(lengths[group]) * (sum(count for _, count in runs) - free.degrees[group])
                for group, *_, runs in free.taken
            ]
            if fewest + sum(extra) < least and _take_holes(free, whole_seconds, launch_seconds):
                best, least = free.placement(), fewest + sum(extra)
            if least <= LITTLE * fewest or not any(extra):
                break
            late = free.taken[int(np.argmax(extra))][0]  # it would have been late, had it not grown
        if looks > LOOKS:
            break
        at = order.index(late)
        order.insert(max(0, at - 1 - turn % STEPS_UP), order.pop(at))
    if best is not None:
        return best
    free = FreeTime(blocks, num_ranks, target)
    for group in range(len(lengths)):
        if free.looks > LOOKS or (looks > LOOKS and not turn):  # the first order alone took too long
            return None
        if not free.reserve(group, target):
            free.reserve(group, np.inf)
    return free.placement()


def _take_holes(free: FreeTime, seconds: FloatArray, launch_seconds: float) -> bool:
    """Run whole sequences in gaps if they would be late otherwise; return whether they are in time then.

    Sequence k becomes group G + k.
    """
    room = sum((free.target - start) * width for start, _, width, stop, _ in free.gaps if stop == np.inf)
    if float(seconds.sum()) <= room:
        return True
    ranks, starts, holes = free.holes()
    hole = into_holes(seconds + launch_seconds, holes)
    if float(seconds[hole < 0].sum()) > room:
        return False
    for number in np.flatnonzero(hole >= 0).tolist():
        start, taken = float(starts[hole[number]]), float(seconds[number]) + launch_seconds
        starts[hole[number]] += taken
        free.taken.append((len(free.degrees) + number, start, start + taken, taken, [(int(ranks[hole[number]]), 1)]))
    return True
