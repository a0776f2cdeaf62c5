"""Our planner: degrees adapt to the cluster and the batch, so that no rank waits and all ranks end together.

    1. Target    the time at which all ranks would end if all work were spread evenly (``target``)
    2. Degrees   each sequence takes the fewest ranks that hold it and end it within the target
    3. Blocks    shared sequences go to consecutive ranks that are free at the same moment, widest first (``blocks``)
    4. Fill      whole sequences go to the ranks that are free first, longest first (``fill``)
    5. Again     while the makespan is not close to the target, try other settings of steps 2 to 4, those with the least
                 traffic first. One setting fills low gaps with shared short sequences (``gaps``). Another one schedules
                 the shared sequences in time first, and then on ranks that need not be consecutive (``backfill``)
    6. Small     with few sequences on few ranks: local search over the degrees (``small``)
    7. Rivals    a plan that is still not close to the target is replaced by the best plan of the other planners, if
                 that is better: Algorithm 2 with our step 3 (``greedy``), with one bucket and with several, and the
                 static mesh

In a pipeline, steps 2 to 4 run for several longest stage times and sizes of packs (``pipeline``), and steps 5 and 6 are
left out. For ranks that differ in speed or capacity, ``mixed`` takes the same steps without 6 and 7.
Shape letters: S sequences, longest first; G of them shared; R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bytescale.common.arrays import IntArray
from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.planner.adaptive import small
from bytescale.planner.adaptive.aligned import align, is_aligned
from bytescale.planner.adaptive.backfill import backfill
from bytescale.planner.adaptive.blocks import place_blocks
from bytescale.planner.adaptive.fill import deal
from bytescale.planner.adaptive.gaps import fill_gaps
from bytescale.planner.adaptive.mixed import mixed_batch, mixed_search
from bytescale.planner.adaptive.pipeline import levels, pack_seconds, pack_sizes
from bytescale.planner.adaptive.placement import Placement
from bytescale.planner.adaptive.target import degrees_within, is_ideal
from bytescale.planner.adaptive.trial import Batch, Trial, num_shared, trial_plan
from bytescale.planner.baselines.greedy import greedy_plan
from bytescale.planner.baselines.static import static_plan
from bytescale.planner.batch import checked_lengths, longest_first
from bytescale.planner.draft import consecutive
from bytescale.planner.evaluate import evaluate
from bytescale.planner.order import rising

FloatArray = NDArray[np.float64]

GOOD_ENOUGH = 1.009
"""A makespan within this factor of the target ends the search."""
GOOD_ENOUGH_MIXED = 1.015
"""The same factor for ranks that differ, where an attempt takes ten times as long."""
CLEARLY_BETTER = 0.998
"""An attempt replaces an earlier one only if it is better by this factor."""
MAX_RIVAL_SEQUENCES = 4096
"""Up to this batch size the plan is compared with the other planners', which take 2 to 10 microseconds a sequence."""


class Attempt(NamedTuple):
    """Settings of one pass through steps 2 to 4."""

    slack: float  # target over the ideal one
    snap: float = 0.0  # how readily a group takes a whole plateau (``blocks``)
    floors: float = 1.0  # degrees are such that this many of the longest sequences fit one after another
    fills: bool = False  # whether low gaps are filled with shared short sequences (``gaps``)
    backfills: bool = False  # whether shared sequences are scheduled by ``backfill``, not as blocks


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Steps 2 and 3 of an attempt. Step 4 is computed on demand: late shared groups make it unnecessary."""

    batch: Batch
    attempt: Attempt
    shared: IntArray  # [G] places in the batch, in the order in which ranks run them
    placed: Placement  # of the shared sequences, up to the first late one
    local: IntArray  # [S - G] places of the others, longest first
    before: IntArray | None = None  # [S - G] member, of all groups, that runs each before its group; -1, or None: none

    @property
    def is_whole(self) -> bool:
        """Whether all shared groups were placed, because none was late."""
        return len(self.placed.degrees) == len(self.shared)

    @cached_property
    def shared_end(self) -> float:
        """Seconds at which the last shared group ends; a lower bound if not all groups were placed."""
        return float(self.placed.free_at.max())

    def ends_by(self, latest: float) -> bool:
        """Whether the whole layout ends by ``latest``. Step 4 is computed only if the shared groups do."""
        return self.shared_end <= latest and self.trial.end <= latest

    @cached_property
    def trial(self) -> Trial:
        """Step 4."""
        batch = self.batch
        # Ranks with short micro-batches only have the bubbles of these.
        bubbles = 0.0 if batch.num_stages == 1 else (batch.num_stages - 1) * pack_seconds(batch)
        seconds, free_at = batch.local_seconds[self.local], np.maximum(self.placed.free_at, bubbles)
        if self.before is None:
            local_ranks, free_at = deal(seconds, free_at)
            return Trial(self.shared, self.placed, self.local, local_ranks, float(free_at.max()))
        behind = np.flatnonzero(self.before < 0)
        local_ranks = self.placed.ranks[self.before]
        local_ranks[behind], free_at = deal(seconds[behind], free_at)
        groups = np.repeat(np.arange(len(self.shared)), self.placed.degrees)
        local_before = np.where(self.before < 0, len(self.shared), groups[self.before])
        return Trial(self.shared, self.placed, self.local, local_ranks, float(free_at.max()), local_before)


FIRST = Attempt(1.004)
BACKFILLED = tuple(Attempt(slack, backfills=True) for slack in (1.0085, 1.02, 1.05, 1.1, 1.25))
ATTEMPTS = (
    Attempt(1.009),
    Attempt(1.009, fills=True),
    *BACKFILLED,
    *(Attempt(1.004, snap) for snap in (0.2, 0.4)),
    *(Attempt(1.01, snap, floors) for floors in (2, 8, 64) for snap in (0.3, 0.6)),
)
"""Attempts after ``FIRST``, on clusters of less than ``LARGE`` ranks."""
SLACK_IN_PIPELINE = 1.01
LARGE = 512
"""From this many ranks on, fewer attempts are made: those below, chosen by what was late in the first attempt."""
LATE_BLOCKS = (Attempt(1.004, 0.4), Attempt(1.01, 0.3, 8), *BACKFILLED)
LATE_WHOLE = (Attempt(1.009), Attempt(1.009, fills=True), *BACKFILLED)


def adaptive_plan(lengths: ArrayLike, *, cluster: Cluster, cost: CostModel, num_stages: int = 1) -> Plan:
    """Plan one global batch so that all ranks end as early as possible, with little traffic.

    Args:
        lengths: ``[S]`` tokens per sequence.
        cluster: the ranks.
        cost: tells the time of a group.
        num_stages: pipeline stages; with more than one, the plan cannot hang under 1F1B (``aligned``).

    Raises:
        PlanError: for an empty batch, lengths below 1, or a sequence that the whole cluster cannot hold.
    """
    lengths = checked_lengths(lengths, cluster=cluster)
    order = longest_first(lengths)
    if not cluster.is_uniform:
        batch = mixed_batch(lengths[order], cluster, cost)
        plan = trial_plan(batch, mixed_search(batch, GOOD_ENOUGH_MIXED), order, lengths, "balanced/adaptive")
        if num_stages == 1 or is_aligned(plan):
            return plan
        return align(greedy_plan(lengths, cluster=cluster, cost=cost, num_buckets=1), cluster=cluster, cost=cost)
    batch = Batch.of(lengths[order], cluster, cost, num_stages)
    if num_stages > 1:
        return _plan_in_pipeline(batch, order, lengths)
    trial = _search(batch)
    if len(order) <= small.MAX_SEQUENCES and cluster.num_ranks <= small.MAX_RANKS:
        trial = small.improve(batch, trial, GOOD_ENOUGH * batch.target)
    return _best_of_rivals(trial_plan(batch, trial, order, lengths, "balanced/adaptive"), batch)


def _search(batch: Batch) -> Trial:
    """Steps 2 to 5. Returns the best trial."""
    enough = GOOD_ENOUGH * batch.target
    is_large = batch.cluster.num_ranks >= LARGE
    limit = enough if is_large else np.inf  # few attempts on a large cluster: those cut short can be repeated below
    laid = [_lay_out(batch, FIRST, limit)]
    attempts = ATTEMPTS
    if is_large:
        attempts = LATE_BLOCKS if laid[0].shared_end > enough else LATE_WHOLE
    for attempt in attempts:
        if laid[-1].ends_by(enough):
            break
        laid.append(_lay_out(batch, attempt, limit))
    if laid[-1].ends_by(enough):
        return laid[-1].trial
    laid = [layout if layout.is_whole else _lay_out(batch, layout.attempt) for layout in laid]
    chosen = laid[0]
    for layout in laid:
        if layout.ends_by(CLEARLY_BETTER * chosen.trial.end):
            chosen = layout
    return chosen.trial


def _plan_in_pipeline(batch: Batch, order: IntArray, lengths: IntArray) -> Plan:
    """The best of several plans: one per size of packs, and one made as if there were no pipeline."""
    cluster, cost = batch.cluster, batch.cost
    plans = [adaptive_plan(lengths, cluster=cluster, cost=cost)]  # the best one where rings cost more than bubbles
    for pack_tokens in pack_sizes(int(cluster.capacity_tokens.min())):
        sized = batch
        if pack_tokens is not None:
            sized = Batch.of(batch.lengths, cluster, cost, batch.num_stages, pack_tokens)
        plans.append(trial_plan(sized, _search_in_pipeline(sized), order, lengths, "balanced/adaptive"))
    aligned = [align(plan, cluster=cluster, cost=cost) for plan in plans]
    return _best_of_rivals(min(aligned, key=partial(_end, batch)), batch)


def _search_in_pipeline(batch: Batch) -> Trial:
    """Steps 2 to 4 for the most promising of the longest stage times (``pipeline``)."""
    attempts = (
        Attempt(SLACK_IN_PIPELINE * level.end / batch.target, snap, level.end / level.longest)
        for level in levels(batch, batch.num_stages)
        for snap in (0.0, 0.3)
    )
    return min((_lay_out(batch, attempt).trial for attempt in attempts), key=lambda trial: trial.end)


def _lay_out(batch: Batch, attempt: Attempt, limit: float = np.inf) -> Layout:
    """Steps 2 and 3. Step 3 stops at the first group that ends after ``limit`` seconds."""
    target, num_ranks = attempt.slack * batch.target, batch.cluster.num_ranks
    count = num_shared(batch.fewest, batch.local_seconds, target / attempt.floors)
    degrees, seconds = degrees_within(
        batch.cost, batch.lengths[:count], batch.fewest[:count], num_ranks, target / attempt.floors
    )
    shared, local = rising(degrees.max(initial=1) - degrees), np.arange(count, len(batch.lengths))
    if attempt.backfills:
        found = backfill(
            batch.lengths[shared],
            degrees[shared],
            cost=batch.cost,
            num_ranks=num_ranks,
            target=target,
            whole_seconds=batch.local_seconds[count:],
        )
        return Layout(
            batch=batch,
            attempt=attempt,
            shared=shared[found.items],
            placed=found.placement,
            local=local,
            before=found.in_holes,
        )
    placed = place_blocks(
        batch.lengths[shared],
        degrees[shared],
        cost=batch.cost,
        num_ranks=num_ranks,
        target=target,
        snap=attempt.snap,
        narrow_work=_narrow_work(batch, degrees, seconds) if attempt.snap > 0 else None,
        num_stages=batch.num_stages,
        limit=limit,
    )
    if attempt.fills and len(placed.degrees) == len(shared):
        fillers = fill_gaps(batch, count, placed.free_at, target)
        shared, local = np.append(shared, local[fillers.places]), np.delete(local, fillers.places)
        placed = Placement(
            ranks=np.append(placed.ranks, consecutive(fillers.first, fillers.degrees)),
            degrees=np.append(placed.degrees, fillers.degrees),
            free_at=fillers.free_at,
        )
    return Layout(batch=batch, attempt=attempt, shared=shared, placed=placed, local=local)


def _narrow_work(batch: Batch, degrees: IntArray, seconds: FloatArray) -> FloatArray:
    """``[max degree + 1]`` for each degree, the rank-seconds of all sequences of at most this degree."""
    work = np.bincount(degrees, weights=degrees * seconds, minlength=2)
    work[1] += batch.local_seconds[len(degrees) :].sum()
    return np.cumsum(work)


def _end(batch: Batch, plan: Plan) -> float:
    return evaluate(plan, cluster=batch.cluster, cost=batch.cost, num_stages=batch.num_stages).end_seconds


def _best_of_rivals(plan: Plan, batch: Batch) -> Plan:
    """Step 7: the best of ``plan`` and the plans of other planners, until one is good enough.

    With free communication, a static mesh balances every batch at no cost. A plan close to the target is then good
    enough; otherwise it has to reach the target.
    """
    if plan.num_sequences > MAX_RIVAL_SEQUENCES:
        return plan
    enough = GOOD_ENOUGH * batch.target if is_ideal(batch.cost) else batch.target
    cluster, cost = batch.cluster, batch.cost
    end = _end(batch, plan)
    mesh_holds = int(plan.lengths.max()) <= cluster.num_ranks * int(cluster.capacity_tokens.min())
    rivals: list[Callable[..., Plan]] = [partial(greedy_plan, num_buckets=1), greedy_plan]
    for planner in rivals + [static_plan] * mesh_holds:  # the mesh does not offload
        if end <= enough:
            break
        rival = planner(plan.lengths, cluster=cluster, cost=cost)
        if batch.num_stages > 1:
            rival = align(rival, cluster=cluster, cost=cost)
        rival_end = _end(batch, rival)
        if rival_end < end:
            plan, end = rival, rival_end
    return plan
