"""One way to assign the batch to the ranks, and how it becomes a plan.

Shape letters: S sequences, longest first; G of them shared; R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan import Plan
from bytescale.plan.nodes import alignment, crossings
from bytescale.planner.adaptive.free import Placement
from bytescale.planner.adaptive.target import Batch
from bytescale.planner.adaptive.unequal import grids
from bytescale.planner.batch import rising
from bytescale.planner.draft import Draft, assemble, in_member_order
from bytescale.planner.packing import micro_batches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """Shared sequences in the order in which ranks run them; then the others, which stay whole."""

    shared: IntArray  # [G] places in the batch
    placed: Placement
    whole: IntArray  # [S - G] places in the batch
    whole_ranks: IntArray  # [S - G] rank of each of them
    end: float  # makespan in seconds
    pack_tokens: int  # most tokens of whole sequences in one micro-batch
    traffic_tokens: int  # of the shared sequences: sum of s (D - 1)


def trial_plan(batch: Batch, trial: Trial, order: IntArray, lengths: IntArray, planner: str) -> Plan:
    """The trial as a ``Plan``: shared groups in their order, and every rank's whole sequences in packs.

    Args:
        order: ``[S]`` sequence number of each place in the batch.
        lengths: ``[S]`` tokens, by sequence number.
    """
    count, num_ranks = len(trial.shared), batch.cluster.num_ranks
    by_rank = rising(trial.whole_ranks)
    places, of_rank = trial.whole[by_rank], trial.whole_ranks[by_rank]
    # A whole sequence above the capacity offloads the excess and fills a micro-batch by itself.
    capacity = np.minimum(batch.cluster.capacity_tokens, trial.pack_tokens)
    index = micro_batches(np.minimum(batch.lengths[places], capacity[of_rank]), of_rank, capacity)
    if batch.num_stages > 1:
        index, _ = longest_packs_first(batch, places, of_rank, index)
    # One group per micro-batch, in order of time: first packs of all ranks, then second packs, and so on.
    packs = index * num_ranks + of_rank
    by_pack = rising(packs)
    places, packs = places[by_pack], packs[by_pack]
    heads = np.flatnonzero(np.append(True, packs[1:] != packs[:-1])[: len(places)])
    placed = trial.placed
    columns, ranks, weights = group_shapes(
        batch.lengths[trial.shared], placed.degrees, placed.ranks, batch.cluster, batch.cost
    )
    draft = Draft(
        sequences=order[np.concatenate((trial.shared, places))],
        sequence_counts=np.concatenate((np.ones(count, np.int64), np.diff(np.append(heads, len(places))))),
        ranks=np.append(ranks, packs[heads] % num_ranks),
        degrees=np.append(trial.placed.degrees, np.ones(len(heads), np.int64)),
        slots=np.append(np.arange(count), count + packs[heads] // num_ranks),
        weights=None if weights is None else np.append(weights, np.ones(len(heads), np.int64)),
        columns=np.append(columns, np.ones(len(heads), np.int64)),
    )
    return assemble(draft, lengths=lengths, cluster=batch.cluster, planner=planner)


def pipeline_ends(batch: Batch, placed: Placement, whole: IntArray, whole_ranks: IntArray) -> FloatArray:
    """``[R]`` seconds at which each rank of a pipeline ends: as ``evaluate``, because no member of a block waits."""
    if not len(whole):
        return placed.free_at
    by_rank = rising(whole_ranks)
    places, ranks = whole[by_rank], whole_ranks[by_rank]
    capacity = np.minimum(batch.cluster.capacity_tokens, batch.pack_tokens)
    index = micro_batches(np.minimum(batch.lengths[places], capacity[ranks]), ranks, capacity)
    _, seconds = longest_packs_first(batch, places, ranks, index)
    rises = np.maximum(seconds[0] - placed.last, 0.0)
    return placed.free_at + seconds.sum(axis=0) + (batch.num_stages - 1) * rises


def longest_packs_first(
    batch: Batch, places: IntArray, ranks: IntArray, index: IntArray
) -> tuple[IntArray, FloatArray]:
    """The packs of every rank, longest first, so that one of them has bubbles: new ``index [n]``, and their times.

    ``places``, ``ranks`` and ``index [n]``: whole sequences, where each runs, and its pack there. The times are
    ``[most packs, R]`` seconds, 0 where a rank has fewer packs.
    """
    seconds: FloatArray = np.zeros((int(index.max(initial=-1)) + 1, batch.cluster.num_ranks))
    np.add.at(seconds, (index, ranks), batch.cost.work_seconds(batch.lengths[places]))
    seconds = np.where(seconds > 0, seconds + batch.cost.micro_batch_seconds, 0.0)
    order = np.argsort(-seconds, axis=0, kind="stable")
    return np.argsort(order, axis=0)[index, ranks], np.sort(seconds, axis=0)[::-1]


def group_shapes(
    lengths: IntArray, degrees: IntArray, ranks: IntArray, cluster: Cluster, cost: CostModel
) -> tuple[IntArray, IntArray, IntArray | None]:
    """The best shapes of groups of one sequence each: ``[G]`` columns, ``[E]`` ranks and weights in member order.

    ``lengths [G]`` are tokens, ``degrees [G]`` ranks of each, and ``ranks [E]`` those of all groups, group by group,
    neighbours beside each other. Weights are None if all are 1.
    """
    if not cluster.is_uniform:
        return grids(lengths, degrees, ranks, cluster, cost)
    if not len(degrees):
        return degrees, ranks, None
    rings, node = np.ones(len(degrees), dtype=np.int64), cost.ranks_per_node
    far = crossings(ranks, degrees, rings, ranks_per_node=node).columns
    runs = alignment(ranks, degrees, ranks_per_node=node)
    tokens = lengths.astype(np.float64)
    shape = cost.best_shape(tokens, cost.squares_of(tokens), degrees, far, runs)
    return shape.columns, in_member_order(ranks, degrees, shape.columns, shape.down), None
