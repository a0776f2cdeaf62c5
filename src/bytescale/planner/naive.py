"""Algorithm 1 of the paper: hybrid data parallelism with the fewest ranks per sequence, and no balance."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.planner.batch import checked_lengths, longest_first
from bytescale.planner.draft import Draft, assemble, consecutive
from bytescale.planner.packing import best_fit, grouped, smallest_capacity

IntArray = NDArray[np.int64]


def naive_plan(lengths: ArrayLike, *, cluster: Cluster, cost: CostModel | None = None) -> Plan:
    """Long sequences on the fewest ranks, short ones packed, all dealt to the ranks in turn (paper Algorithm 1).

    1. A sequence longer than the capacity C takes the fewest ranks that hold it (Eq. 3; ceil(s / C) if the cluster
       does not offload).
    2. Shorter ones are packed, best fit, into micro-batches of at most C tokens.
    3. Each takes the next D ranks, round and round, longest first.

    Args:
        lengths: ``[S]`` tokens per sequence.
        cluster: the ranks; the smallest capacity counts for all.
        cost: not looked at; here so that all planners are called alike.
    """
    del cost
    lengths = checked_lengths(lengths, cluster=cluster, uniform=True)
    sequences, counts, degrees = minimal_groups(lengths, longest_first(lengths), cluster)
    first = np.cumsum(degrees) - degrees
    draft = Draft(
        sequences=sequences,
        sequence_counts=counts,
        ranks=consecutive(first, degrees, modulo=cluster.num_ranks),
        degrees=degrees,
        slots=np.arange(len(degrees)),
    )
    return assemble(draft, lengths=lengths, cluster=cluster, planner="naive")


def minimal_groups(lengths: IntArray, order: IntArray, cluster: Cluster) -> tuple[IntArray, IntArray, IntArray]:
    """Steps 1 and 2: groups as (sequences group by group ``[S]``, sequences per group ``[G]``, degrees ``[G]``).

    ``order`` holds the sequence numbers, longest first; long sequences' groups come first.
    """
    capacity = smallest_capacity(cluster)
    num_long = int((lengths[order] > capacity).sum())
    long, short = order[:num_long], order[num_long:]
    packs, pack_counts = grouped(short, best_fit(lengths[short], capacity))
    return (
        np.concatenate((long, packs)),
        np.concatenate((np.ones(num_long, dtype=np.int64), pack_counts)),
        np.concatenate((cluster.fewest_ranks(lengths[long]), np.ones(len(pack_counts), dtype=np.int64))),
    )
