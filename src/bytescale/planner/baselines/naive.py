"""Algorithm 1 of the paper: hybrid data parallelism with the fewest ranks per sequence, without balancing."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from bytescale.common.arrays import IntArray
from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.planner.batch import checked_lengths
from bytescale.planner.draft import Draft, assemble
from bytescale.planner.packing import best_fit, grouped


def naive_plan(
    lengths: ArrayLike,
    *,
    cluster: Cluster,
    cost: CostModel | None = None,
) -> Plan:
    """Long sequences on the fewest ranks, short ones packed, all assigned to the ranks in turn (paper Algorithm 1).

    1. A sequence longer than the capacity C takes the fewest ranks that hold it (Eq. 3; ceil(s / C) if the cluster
       does not offload).
    2. Shorter ones are packed, best fit, into micro-batches of at most C tokens.
    3. In the batch's order of arrival, each takes the next D ranks, cyclically; a pack takes the place of its first
       sequence. So the plan depends on the order of ``lengths``, unlike that of any other planner.

    Args:
        lengths: ``[S]`` tokens per sequence.
        cluster: the ranks; the smallest capacity limits all of them.
        cost: ignored; it is a parameter so that all planners are called alike.
    """
    del cost
    lengths = checked_lengths(lengths, cluster=cluster, uniform=True)
    capacity = int(cluster.capacity_tokens.min())
    degrees = cluster.fewest_ranks(lengths)
    is_long = (degrees > 1) | (lengths > capacity)
    long, short = np.flatnonzero(is_long), np.flatnonzero(~is_long)
    # One bin per long sequence, then the packs; a stable sort keeps the order of arrival inside each.
    bins = np.empty(len(lengths), dtype=np.int64)
    bins[long], bins[short] = np.arange(len(long)), len(long) + best_fit(lengths[short], capacity)
    _, arrival, group_of = np.unique(bins, return_index=True, return_inverse=True)
    place = np.empty_like(arrival)
    place[np.argsort(arrival, kind="stable")] = np.arange(len(arrival))
    sequences, counts = grouped(np.arange(len(lengths)), place[group_of])
    heads = sequences[np.cumsum(counts) - counts]
    group_degrees = degrees[heads]
    draft = Draft(
        sequences=sequences,
        sequence_counts=counts,
        ranks=np.arange(group_degrees.sum()) % cluster.num_ranks,
        degrees=group_degrees,
        slots=np.arange(len(counts)),
    )
    return assemble(draft, lengths=lengths, cluster=cluster, planner="naive")


def minimal_groups(lengths: IntArray, order: IntArray, cluster: Cluster) -> tuple[IntArray, IntArray, IntArray]:
    """Steps 1 and 2 for a bucket of Algorithm 2, whose sequence numbers ``order`` are longest first.

    Returns sequences group by group, long ones first; sequences per group ``[G]``; degrees ``[G]``.
    """
    capacity = int(cluster.capacity_tokens.min())
    num_long = int((lengths[order] > capacity).sum())
    long, short = order[:num_long], order[num_long:]
    packs, pack_counts = grouped(short, best_fit(lengths[short], capacity))
    return (
        np.concatenate((long, packs)),
        np.concatenate((np.ones(num_long, dtype=np.int64), pack_counts)),
        np.concatenate((cluster.fewest_ranks(lengths[long]), np.ones(len(pack_counts), dtype=np.int64))),
    )
