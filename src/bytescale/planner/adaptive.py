"""Our planner: degrees follow the cluster and the batch, nobody waits, everybody ends together.

    1. Target    the time at which everybody would end if all work were spread evenly (``target``)
    2. Degrees   each sequence takes the fewest ranks that hold it and end it within the target
    3. Blocks    shared sequences go to consecutive ranks that are free at the same moment, widest first (``blocks``)
    4. Fill      whole sequences go to the ranks that are free first, longest first (``fill``)
    5. Again     while the end is not close to the target: other settings of steps 2 to 4, least traffic first; some of
                 them fill low gaps with shared short sequences (``gaps``)
    6. Trim      groups that grew in step 3 go back to their degree where the end allows it
    7. Small     few sequences on few ranks: local search over the degrees (``small``)
    8. Rivals    what is still not close to the target has to beat the paper's planner, fewest ranks, and the mesh

In a pipeline steps 2 to 4 are taken for several longest stage times (``pipeline``), and 5 to 7 left out. Ranks that
differ in speed or capacity take the same steps in ``mixed``, without 6 to 8.
Shape letters: S sequences, longest first; G of them shared; R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.planner import small
from bytescale.planner.aligned import align, is_aligned
from bytescale.planner.batch import checked_lengths, longest_first
from bytescale.planner.blocks import Blocks, place_blocks
from bytescale.planner.evaluate import evaluate
from bytescale.planner.fill import deal
from bytescale.planner.gaps import fill_gaps
from bytescale.planner.mixed import mixed_batch, mixed_search
from bytescale.planner.order import rising
from bytescale.planner.paper import paper_plan
from bytescale.planner.pipeline import levels, pack_seconds
from bytescale.planner.shelves import Shelves, fill_shelves
from bytescale.planner.static import static_plan
from bytescale.planner.target import degrees_within, is_ideal
from bytescale.planner.trial import Batch, Trial, num_shared, trial_plan

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

GOOD_ENOUGH = 1.009
"""An end within this factor of the target ends the search."""
GOOD_ENOUGH_MIXED = 1.015
"""The same for ranks that differ, where an attempt takes ten times as long."""
CLEARLY_BETTER = 0.998
"""An attempt replaces an earlier one only if it is better by this factor."""
TRIMS = 12
"""Groups that step 6 tries to put back to their degree."""
MAX_RIVAL_SEQUENCES = 4096
"""Batches up to this size are compared with the other planners, which take 2 to 10 microseconds a sequence."""


class Attempt(NamedTuple):
    """Settings of one pass through steps 2 to 4."""

    slack: float  # target over the ideal one
    snap: float  # how readily a group takes a whole plateau (``blocks``)
    floors: float = 1  # degrees are chosen so that this many of the longest sequences fit above each other
    fills: bool = False  # whether low gaps are filled with shared short sequences (``gaps``)
    shelves: float = 0.0  # sequences of more than this share of the ranks stand on shelves (``shelves``); 0: none
    pairs: bool = False  # whether these are filled with two sequences in mind


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Steps 2 and 3 of an attempt, and step 4 when asked for: an attempt whose shared groups are late needs none."""

    batch: Batch
    attempt: Attempt
    shared: IntArray  # [G] places in the batch, in the order in which ranks meet them
    asked: IntArray  # [G] degrees before growing
    blocks: Blocks
    local: IntArray  # [S - G] places of the others, longest first

    @property
    def is_whole(self) -> bool:
        """Whether all shared groups were placed: none was late."""
        return len(self.blocks.first) == len(self.shared)

    @cached_property
    def shared_end(self) -> float:
        """When the last shared group ends, seconds; at least so late where not all were placed."""
        return float(self.blocks.free_at.max())

    @cached_property
    def trial(self) -> Trial:
        """Step 4."""
        batch = self.batch
        # A pipeline of short micro-batches only has their bubbles.
        bubbles = 0.0 if batch.num_stages == 1 else (batch.num_stages - 1) * pack_seconds(batch)
        local_ranks, free_at = deal(batch.local_seconds[self.local], np.maximum(self.blocks.free_at, bubbles))
        return Trial(
            shared=self.shared,
            asked=self.asked,
            blocks=self.blocks,
            local=self.local,
            local_ranks=local_ranks,
            end=float(free_at.max()),
        )


FIRST = Attempt(1.004, 0.0)
ATTEMPTS = (
    Attempt(1.009, 0.0),
    Attempt(1.009, 0.0, fills=True),
    *(Attempt(1.009, snap, shelves=share) for snap in (0.0, 0.3, 0.4) for share in (0.5, 0.4, 0.33, 0.25, 0.2)),
    *(Attempt(1.009, 0.0, shelves=share, pairs=True) for share in (0.4, 0.33, 0.25)),
    *(Attempt(1.004, snap) for snap in (0.1, 0.2, 0.3, 0.4, 0.5)),
    *(Attempt(slack, snap) for slack in (1.02, 1.05, 1.1, 1.25) for snap in (0.0, 0.3)),
    *(Attempt(1.01, snap, floors) for floors in (2, 4, 8, 64) for snap in (0.0, 0.3, 0.6)),
)
"""Below ``LARGE`` ranks."""
SLACK_IN_PIPELINE = 1.01
LARGE = 512
"""Ranks from which the effort is bounded: two attempts more, chosen by what was late in the first, and no trimming."""
LATE_BLOCKS = (Attempt(1.004, 0.4), Attempt(1.01, 0.3, 8))
LATE_WHOLE = (Attempt(1.009, 0.0), Attempt(1.009, 0.0, fills=True))


def adaptive_plan(lengths: ArrayLike, *, cluster: Cluster, cost: CostModel, num_stages: int = 1) -> Plan:
    """Plan one global batch so that all ranks end as early as possible, with little traffic.

    Args:
        lengths: ``[S]`` tokens per sequence.
        cluster: the ranks.
        cost: tells the time of a group.
        num_stages: of the pipeline; above 1 the plan is one that cannot hang under 1F1B (``aligned``).

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
        return paper_plan(lengths, cluster=cluster, cost=cost, num_buckets=1, aligned=True)
    batch = Batch.of(lengths[order], cluster, cost, num_stages)
    trial = _search(batch) if num_stages == 1 else _search_in_pipeline(batch)
    if num_stages == 1 and len(order) <= small.MAX_SEQUENCES and cluster.num_ranks <= small.MAX_RANKS:
        trial = small.improve(batch, trial, GOOD_ENOUGH * batch.target)
    plan = trial_plan(batch, trial, order, lengths, "balanced/adaptive")
    if num_stages == 1:
        return _best_of_rivals(plan, batch)
    flat = adaptive_plan(lengths, cluster=cluster, cost=cost)  # where rings are dear, bubbles may be cheaper
    plans = [align(plan, cluster=cluster, cost=cost), align(flat, cluster=cluster, cost=cost)]
    return _best_of_rivals(min(plans, key=partial(_end, batch)), batch)


def _search(batch: Batch) -> Trial:
    """Steps 2 to 6: the best trial."""
    enough = GOOD_ENOUGH * batch.target
    is_large = batch.cluster.num_ranks >= LARGE
    limit = enough if is_large else np.inf  # a few attempts are soon made again; many are not
    laid, known = [_lay_out(batch, FIRST, limit=limit)], dict[tuple[float, int, bool], Shelves]()
    attempts = ATTEMPTS
    if is_large:
        attempts = LATE_BLOCKS if laid[0].shared_end > enough else LATE_WHOLE
    for attempt in attempts:
        if laid[-1].shared_end <= enough and laid[-1].trial.end <= enough:
            break
        laid.append(_lay_out(batch, attempt, known=known, limit=limit))
    chosen = laid[-1]
    if chosen.shared_end > enough or chosen.trial.end > enough:
        laid = [layout if layout.is_whole else _lay_out(batch, layout.attempt) for layout in laid]
        chosen = laid[0]
        for layout in laid:
            latest = CLEARLY_BETTER * chosen.trial.end
            if layout.shared_end < latest and layout.trial.end < latest:
                chosen = layout
    return _trim(chosen) if chosen.attempt.snap > 0 and not is_large else chosen.trial


def _search_in_pipeline(batch: Batch) -> Trial:
    """Steps 2 to 4 for the most promising of the longest stage times (``pipeline``)."""
    attempts = (
        Attempt(SLACK_IN_PIPELINE * level.end / batch.target, snap, level.end / level.longest)
        for level in levels(batch, batch.num_stages)
        for snap in (0.0, 0.3)
    )
    return min((_lay_out(batch, attempt).trial for attempt in attempts), key=lambda trial: trial.end)


def _lay_out(
    batch: Batch,
    attempt: Attempt,
    *,
    may_snap: NDArray[np.bool_] | None = None,
    known: dict[tuple[float, int, bool], Shelves] | None = None,
    limit: float = np.inf,
) -> Layout:
    """Steps 2 and 3, the latter up to a group that ends after ``limit``. ``known`` keeps shelves for later attempts."""
    target, num_ranks = attempt.slack * batch.target, batch.cluster.num_ranks
    count = num_shared(batch.fewest, batch.local_seconds, target / attempt.floors)
    degrees, seconds = degrees_within(
        batch.cost, batch.lengths[:count], batch.fewest[:count], num_ranks, target / attempt.floors
    )
    shared, local = rising(degrees.max(initial=1) - degrees), np.arange(count, len(batch.lengths))
    asked = degrees[shared]
    place = partial(
        place_blocks,
        cost=batch.cost,
        num_ranks=num_ranks,
        target=target,
        snap=attempt.snap,
        narrow_work=_narrow_work(batch, degrees, seconds) if attempt.snap > 0 else None,
        num_stages=batch.num_stages,
        limit=limit,
    )
    if attempt.shelves == 0:
        blocks = place(batch.lengths[shared], asked, may_snap=may_snap)
    else:
        narrowest = max(2, int(attempt.shelves * num_ranks) + 1)
        known, key = {} if known is None else known, (attempt.slack, int((degrees >= narrowest).sum()), attempt.pairs)
        if key not in known:
            known[key] = _shelve(batch, degrees, narrowest, attempt.pairs)
        shelves = known[key]
        shared, local = (part[~np.isin(part, shelves.items)] for part in (shared, local))
        may_snap = None if may_snap is None else may_snap[len(shelves.items) :]
        blocks = place(batch.lengths[shared], degrees[shared], may_snap=may_snap, start=shelves.top)
        asked = np.append(shelves.degrees, degrees[shared])
        shared = np.append(shelves.items, shared)
        blocks = blocks.behind(shelves.first, shelves.degrees)
    if attempt.fills and len(blocks.first) == len(shared):
        fillers = fill_gaps(batch, count, blocks.free_at, target)
        shared = np.append(shared, local[fillers.places])
        asked = np.append(asked, fillers.degrees)
        local = np.delete(local, fillers.places)
        blocks = Blocks(
            first=np.append(blocks.first, fillers.first),
            degrees=np.append(blocks.degrees, fillers.degrees),
            free_at=fillers.free_at,
        )
    return Layout(batch=batch, attempt=attempt, shared=shared, asked=asked, blocks=blocks, local=local)


def _narrow_work(batch: Batch, degrees: IntArray, seconds: FloatArray) -> FloatArray:
    """``[max degree + 1]`` rank-seconds of all sequences of at most each degree."""
    work = np.bincount(degrees, weights=degrees * seconds, minlength=2)
    work[1] += batch.local_seconds[len(degrees) :].sum()
    return np.cumsum(work)


def _shelve(batch: Batch, degrees: IntArray, narrowest: int, pairs: bool) -> Shelves:
    """Shelves for all sequences of at least ``narrowest`` ranks, whole ones among the fillers."""
    degrees = np.append(degrees, np.ones(len(batch.lengths) - len(degrees), np.int64))
    squares = np.square(batch.lengths.astype(np.float64))
    seconds = batch.cost.group_seconds(batch.lengths, squares, degrees, degrees > 1)  # wherever nodes end
    return fill_shelves(degrees, seconds, num_ranks=batch.cluster.num_ranks, narrowest=narrowest, pairs=pairs)


def _trim(layout: Layout) -> Trial:
    """Step 6: forbid the costliest growths one by one, and keep what does not end later."""
    batch, best, known = layout.batch, layout.trial, dict[tuple[float, int, bool], Shelves]()
    limit = max(best.end, GOOD_ENOUGH * batch.target)
    saving = batch.lengths[best.shared] * (best.blocks.degrees - best.asked)
    may_snap = np.ones(len(saving), dtype=bool)
    for group in np.argsort(-saving, kind="stable")[:TRIMS].tolist():
        if saving[group] == 0:
            break
        may_snap[group] = False
        other = _lay_out(batch, layout.attempt, may_snap=may_snap, known=known)
        if other.shared_end <= limit and other.trial.end <= limit and other.trial.traffic(batch) < best.traffic(batch):
            best = other.trial
        else:
            may_snap[group] = True
    return best


def _end(batch: Batch, plan: Plan) -> float:
    return evaluate(plan, cluster=batch.cluster, cost=batch.cost, num_stages=batch.num_stages).end_seconds


def _best_of_rivals(plan: Plan, batch: Batch) -> Plan:
    """Step 8. With free communication the mesh always balances and never pays: then only what is close counts."""
    if plan.num_sequences > MAX_RIVAL_SEQUENCES:
        return plan
    enough = GOOD_ENOUGH * batch.target if is_ideal(batch.cost) else batch.target
    cluster, cost, aligned = batch.cluster, batch.cost, batch.num_stages > 1
    end = _end(batch, plan)
    mesh_holds = int(plan.lengths.max()) <= cluster.num_ranks * int(cluster.capacity_tokens.min())
    rivals: list[Callable[..., Plan]] = [
        partial(paper_plan, num_buckets=1, aligned=aligned),
        partial(paper_plan, aligned=aligned),
    ]
    for planner in rivals + [static_plan] * mesh_holds:  # the mesh is aligned, and does not offload
        if end <= enough:
            break
        rival = planner(plan.lengths, cluster=cluster, cost=cost)
        rival_end = _end(batch, rival)
        if rival_end < end:
            plan, end = rival, rival_end
    return plan
