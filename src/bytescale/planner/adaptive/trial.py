"""One way to assign the batch to the ranks, and how it becomes a plan.

Shape letters: S sequences, longest first; G of them shared; R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.plan import Plan
from bytescale.plan.nodes import alignment, crossings
from bytescale.planner.adaptive.place import Placement
from bytescale.planner.adaptive.target import Batch
from bytescale.planner.adaptive.unequal import grids
from bytescale.planner.draft import Draft, assemble, in_member_order
from bytescale.planner.order import rising
from bytescale.planner.packing import micro_batches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """Shared sequences in the order in which ranks run them; then the others, which stay whole."""

    shared: IntArray  # [G] places in the batch
    placed: Placement
    whole: IntArray  # [S - G] places in the batch
    whole_ranks: IntArray  # [S - G] rank of each of them
    end: float  # makespan in seconds
    traffic_tokens: int  # of the shared sequences: sum of s (D - 1)
    weights: IntArray | None = None  # [sum of degrees] shares of the shared groups' members; None: equal


def trial_plan(batch: Batch, trial: Trial, order: IntArray, lengths: IntArray, planner: str) -> Plan:
    """The trial as a ``Plan``: shared groups in their order, and every rank's whole sequences in packs.

    Args:
        batch: the batch.
        trial: one way to assign it to the ranks.
        order: ``[S]`` sequence number of each place in the batch.
        lengths: ``[S]`` tokens, by sequence number.
        planner: name of the planner, for people.
    """
    count, num_ranks = len(trial.shared), batch.cluster.num_ranks
    # A berth is a place where a rank runs whole sequences: before one of its shared groups, or after all of them.
    berth_of, berth_ranks, berth_before = trial.whole_ranks, np.arange(num_ranks), np.full(num_ranks, count)
    if trial.placed.gap_before is not None:
        berths, berth_of = np.unique(trial.placed.gap_before * num_ranks + trial.whole_ranks, return_inverse=True)
        berth_ranks, berth_before = berths % num_ranks, berths // num_ranks
    by_berth = rising(berth_of)
    places, berth_of = trial.whole[by_berth], berth_of[by_berth]
    # A whole sequence above the capacity offloads the excess and fills a micro-batch by itself.
    capacity = np.minimum(batch.cluster.capacity_tokens, batch.pack_tokens)[berth_ranks]
    index = micro_batches(np.minimum(batch.lengths[places], capacity[berth_of]), berth_of, capacity)
    if batch.num_stages > 1:
        index, _ = longest_first(batch, places, berth_of, index, len(berth_ranks))
    # One group per micro-batch, in order of time: first packs of all berths, then second packs, and so on.
    packs = index * len(berth_ranks) + berth_of
    by_pack = rising(packs)
    places, packs = places[by_pack], packs[by_pack]
    heads = np.flatnonzero(np.append(True, packs[1:] != packs[:-1])[: len(places)])
    pack_berths, pack_index = packs[heads] % len(berth_ranks), packs[heads] // len(berth_ranks)
    before = berth_before[pack_berths]
    width = 1 + int((pack_index + 1)[before < count].max(initial=0))  # slots: a shared group, packs before it
    columns, ranks, weights = _shapes(batch, trial)
    draft = Draft(
        sequences=order[np.concatenate((trial.shared, places))],
        sequence_counts=np.concatenate((np.ones(count, np.int64), np.diff(np.append(heads, len(places))))),
        ranks=np.concatenate((ranks, berth_ranks[pack_berths])),
        degrees=np.concatenate((trial.placed.degrees, np.ones(len(heads), np.int64))),
        slots=np.concatenate((np.arange(count) * width + width - 1, before * width + pack_index)),
        weights=None if weights is None else np.append(weights, np.ones(len(heads), np.int64)),
        columns=np.append(columns, np.ones(len(heads), np.int64)),
    )
    return assemble(draft, lengths=lengths, cluster=batch.cluster, planner=planner)


def pipeline_ends(batch: Batch, placed: Placement, whole: IntArray, whole_ranks: IntArray) -> FloatArray:
    """``[R]`` seconds at which each rank of a pipeline ends: shared groups, packs of whole sequences, and all bubbles.

    It is what ``evaluate`` finds for the trial's plan, because no member of a block waits.
    """
    if not len(whole):
        return placed.free_at
    by_rank = rising(whole_ranks)
    places, ranks = whole[by_rank], whole_ranks[by_rank]
    capacity = np.minimum(batch.cluster.capacity_tokens, batch.pack_tokens)
    index = micro_batches(np.minimum(batch.lengths[places], capacity[ranks]), ranks, capacity)
    _, seconds = longest_first(batch, places, ranks, index, batch.cluster.num_ranks)
    rises = np.maximum(seconds[0] - placed.last, 0.0)
    return placed.free_at + seconds.sum(axis=0) + (batch.num_stages - 1) * rises


def longest_first(
    batch: Batch, places: IntArray, berths: IntArray, index: IntArray, num_berths: int
) -> tuple[IntArray, FloatArray]:
    """The packs of every berth, longest first, so that one of them has bubbles: new ``index`` ``[n]``, and their times.

    The times are ``[most packs, berths]`` seconds, 0 where a berth has fewer packs.

    Args:
        batch: the batch.
        places: ``[n]`` whole sequences.
        berths: ``[n]`` where each runs.
        index: ``[n]`` pack of each in its berth.
        num_berths: number of berths.
    """
    seconds: FloatArray = np.zeros((int(index.max(initial=-1)) + 1, num_berths))
    np.add.at(seconds, (index, berths), batch.cost.work_seconds(batch.lengths[places]))
    seconds = np.where(seconds > 0, seconds + batch.cost.micro_batch_seconds, 0.0)
    order = np.argsort(-seconds, axis=0, kind="stable")
    return np.argsort(order, axis=0)[index, berths], np.sort(seconds, axis=0)[::-1]


def _shapes(batch: Batch, trial: Trial) -> tuple[IntArray, IntArray, IntArray | None]:
    """``[G]`` columns of the shared groups, and ``[E]`` their ranks and weights in member order, group by group."""
    degrees, ranks = trial.placed.degrees, trial.placed.ranks
    if not len(degrees):
        return degrees, ranks, trial.weights
    if trial.weights is not None:
        return grids(batch.lengths[trial.shared], trial.placed, trial.weights, batch.cluster, batch.cost)
    rings, node = np.ones(len(degrees), dtype=np.int64), batch.cost.ranks_per_node
    far = crossings(ranks, degrees, rings, ranks_per_node=node).columns
    runs = alignment(ranks, degrees, ranks_per_node=node)
    tokens = batch.lengths[trial.shared].astype(np.float64)
    shape = batch.cost.best_shape(tokens, batch.cost.squares_of(tokens), degrees, far, runs)
    return shape.columns, in_member_order(ranks, degrees, shape.columns, shape.down), None
