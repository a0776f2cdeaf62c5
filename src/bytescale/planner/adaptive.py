"""Our planner: degrees follow the cluster and the batch, nobody waits, everybody ends together.

    1. Target    the time at which everybody would end if all work were spread evenly (``target``)
    2. Degrees   each sequence takes the fewest ranks that hold it and end it within the target
    3. Blocks    shared sequences go to consecutive ranks that are free at the same moment, widest first (``blocks``)
    4. Fill      whole sequences go to the ranks that are free first, longest first (``fill``)
    5. Again     while the end is not close to the target: other settings of steps 2 and 3, least traffic first
    6. Trim      groups that grew in step 3 go back to their degree where the end allows it

Shape letters: S sequences, longest first; G of them shared; R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.planner.batch import checked_lengths, longest_first
from bytescale.planner.blocks import Blocks, place_blocks
from bytescale.planner.draft import Draft, assemble, consecutive
from bytescale.planner.fill import deal, micro_batches
from bytescale.planner.target import degrees_within, target_seconds

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

GOOD_ENOUGH = 1.009
"""An end within this factor of the target ends the search."""
CLEARLY_BETTER = 0.998
"""An attempt replaces one with less traffic only if it ends earlier by this factor."""
TRIMS = 12
"""Groups that step 6 tries to put back to their degree."""


class Attempt(NamedTuple):
    """Settings of one pass through steps 2 to 4."""

    slack: float  # target over the ideal one
    snap: float  # how readily a group takes a whole plateau (``blocks``)
    floors: int = 1  # degrees are chosen so that this many of the longest sequences fit above each other


ATTEMPTS = (
    Attempt(1.004, 0.0),
    Attempt(1.009, 0.0),
    *(Attempt(1.004, snap) for snap in (0.1, 0.2, 0.3, 0.4, 0.5)),
    *(Attempt(slack, snap) for slack in (1.02, 1.05, 1.1, 1.25) for snap in (0.0, 0.3)),
    *(Attempt(1.01, snap, floors) for floors in (2, 4, 8) for snap in (0.0, 0.3, 0.6)),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Batch:
    """What no attempt changes."""

    lengths: IntArray  # [S] longest first
    fewest: IntArray  # [S] ranks that hold each
    local_seconds: FloatArray  # [S] on one rank, with its part of a micro-batch's g
    cluster: Cluster
    cost: CostModel
    target: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Trial:
    """What an attempt gives."""

    shared: IntArray  # [G] places in the batch, widest first
    asked: IntArray  # [G] degrees of step 2
    blocks: Blocks
    local_ranks: IntArray  # [S - G] rank of each of the others
    end: float


def adaptive_plan(lengths: ArrayLike, *, cluster: Cluster, cost: CostModel) -> Plan:
    """Plan one global batch so that all ranks end as early as possible, with little traffic.

    Args:
        lengths: ``[S]`` tokens per sequence.
        cluster: the ranks.
        cost: tells the time of a group.

    Raises:
        PlanError: for an empty batch, lengths below 1, or a sequence that the whole cluster cannot hold.
    """
    lengths = checked_lengths(lengths, cluster=cluster, uniform=True)
    order = longest_first(lengths)
    batch = _batch(lengths[order], cluster, cost)
    return _assemble(batch, _search(batch), order, lengths)


def _batch(lengths: IntArray, cluster: Cluster, cost: CostModel) -> _Batch:
    capacity = int(cluster.capacity_tokens.min())
    fewest = -(-lengths // capacity)
    local_seconds = cost.work_seconds(lengths) + lengths * (cost.micro_batch_seconds / capacity)
    ideal = float(local_seconds.sum()) / cluster.num_ranks
    num_long = max(int(np.searchsorted(-fewest, -1)), int(np.searchsorted(-local_seconds, -ideal)))
    target = target_seconds(
        cost, lengths[:num_long], fewest[:num_long], float(local_seconds[num_long:].sum()), cluster.num_ranks
    )
    return _Batch(
        lengths=lengths, fewest=fewest, local_seconds=local_seconds, cluster=cluster, cost=cost, target=target
    )


def _search(batch: _Batch) -> _Trial:
    """Steps 5 and 6: the best trial."""
    best: _Trial | None = None
    snap = 0.0
    for attempt in ATTEMPTS:
        trial = _try(batch, attempt)
        if best is None or trial.end < CLEARLY_BETTER * best.end:
            best, snap, chosen = trial, attempt.snap, attempt
        if best.end <= GOOD_ENOUGH * batch.target:
            break
    assert best is not None, "there is at least one attempt"
    return _trim(batch, chosen, best) if snap > 0 else best


def _try(batch: _Batch, attempt: Attempt, may_snap: NDArray[np.bool_] | None = None) -> _Trial:
    """Steps 2 to 4."""
    target = attempt.slack * batch.target
    num_shared = max(
        int(np.searchsorted(-batch.fewest, -1)), int(np.searchsorted(-batch.local_seconds, -target / attempt.floors))
    )
    num_ranks = batch.cluster.num_ranks
    degrees, seconds = degrees_within(
        batch.cost, batch.lengths[:num_shared], batch.fewest[:num_shared], num_ranks, target / attempt.floors
    )
    widest_first = np.argsort(-degrees, kind="stable")
    asked = degrees[widest_first]
    narrow_work = np.bincount(degrees, weights=degrees * seconds, minlength=2)
    narrow_work[1] += batch.local_seconds[num_shared:].sum()
    blocks = place_blocks(
        batch.lengths[widest_first],
        asked,
        cost=batch.cost,
        num_ranks=num_ranks,
        target=target,
        snap=attempt.snap,
        narrow_work=np.cumsum(narrow_work),
        may_snap=may_snap,
    )
    local_ranks, free_at = deal(batch.local_seconds[num_shared:], blocks.free_at)
    return _Trial(shared=widest_first, asked=asked, blocks=blocks, local_ranks=local_ranks, end=float(free_at.max()))


def _trim(batch: _Batch, attempt: Attempt, best: _Trial) -> _Trial:
    """Step 6: forbid the costliest growths one by one, and keep what does not end later."""
    limit = max(best.end, GOOD_ENOUGH * batch.target)
    saving = batch.lengths[best.shared] * (best.blocks.degrees - best.asked)
    may_snap = np.ones(len(saving), dtype=bool)
    for group in np.argsort(-saving, kind="stable")[:TRIMS].tolist():
        if saving[group] == 0:
            break
        may_snap[group] = False
        trial = _try(batch, attempt, may_snap)
        if trial.end <= limit and _traffic(batch, trial) < _traffic(batch, best):
            best = trial
        else:
            may_snap[group] = True
    return best


def _traffic(batch: _Batch, trial: _Trial) -> int:
    """Sum of s (D - 1)."""
    return int((batch.lengths[trial.shared] * (trial.blocks.degrees - 1)).sum())


def _assemble(batch: _Batch, trial: _Trial, order: IntArray, lengths: IntArray) -> Plan:
    """The trial as a ``Plan``: shared groups in the order of placing, then each rank's whole sequences in packs."""
    num_shared = len(trial.shared)
    by_rank = np.argsort(trial.local_ranks, kind="stable")
    places, ranks = num_shared + by_rank, trial.local_ranks[by_rank]
    index = micro_batches(batch.lengths[places], ranks, batch.cluster.capacity_tokens)
    heads = np.flatnonzero(np.append(True, (np.diff(ranks) != 0) | (np.diff(index) != 0))[: len(places)])
    draft = Draft(
        sequences=order[np.concatenate((trial.shared, places))],
        sequence_counts=np.concatenate((np.ones(num_shared, np.int64), np.diff(np.append(heads, len(places))))),
        ranks=np.concatenate((consecutive(trial.blocks.first, trial.blocks.degrees), ranks[heads])),
        degrees=np.concatenate((trial.blocks.degrees, np.ones(len(heads), np.int64))),
        slots=np.concatenate((np.arange(num_shared), num_shared + index[heads])),
    )
    return assemble(draft, lengths=lengths, cluster=batch.cluster, planner="balanced/adaptive")
