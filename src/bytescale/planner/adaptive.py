"""Our planner: degrees follow the cluster and the batch, nobody waits, everybody ends together."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.planner.batch import checked_lengths, longest_first
from bytescale.planner.blocks import place_blocks
from bytescale.planner.draft import Draft, assemble, consecutive
from bytescale.planner.fill import deal, micro_batches

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def adaptive_plan(lengths: ArrayLike, *, cluster: Cluster, cost: CostModel) -> Plan:
    """Plan one global batch so that all ranks end as early as possible, with little traffic.

    1. *Target*: the time at which everybody would end if all work were spread evenly.
    2. *Degrees*: each sequence takes the fewest ranks that hold it and that end it within the target.
    3. *Blocks*: shared sequences go to consecutive ranks that are free at the same moment (``blocks``).
    4. *Fill*: whole sequences go to the ranks that are free first, longest first (``fill``).

    Args:
        lengths: ``[S]`` tokens per sequence.
        cluster: the ranks.
        cost: tells the time of a group.
    """
    lengths = checked_lengths(lengths, cluster=cluster, uniform=True)
    order = longest_first(lengths)
    ordered = lengths[order]
    capacity = int(cluster.capacity_tokens.min())
    work = cost.work_seconds(ordered)
    target = float(work.sum()) / cluster.num_ranks
    degrees = np.clip(np.ceil(work / (1.002 * target)), 1, cluster.num_ranks).astype(np.int64)
    degrees = np.maximum(degrees, -(-ordered // capacity))
    num_shared = int((degrees > 1).sum())
    squares = ordered.astype(np.float64) ** 2
    shared = np.argsort(-degrees[:num_shared], kind="stable")
    widths = degrees[:num_shared][shared]
    seconds = cost.group_seconds(ordered[shared], squares[shared], widths, widths > cost.ranks_per_node)
    first, free_at = place_blocks(widths, seconds, cluster.num_ranks)
    ranks, _ = deal(work[num_shared:], free_at)
    by_rank = np.argsort(ranks, kind="stable")
    local, local_ranks = order[num_shared:][by_rank], ranks[by_rank]
    index = micro_batches(lengths[local], local_ranks, cluster.capacity_tokens)
    heads = np.flatnonzero(np.append(True, (np.diff(local_ranks) != 0) | (np.diff(index) != 0))[: len(local)])
    draft = Draft(
        sequences=np.concatenate((order[:num_shared][shared], local)),
        sequence_counts=np.concatenate((np.ones(num_shared, np.int64), np.diff(np.append(heads, len(local))))),
        ranks=np.concatenate((consecutive(first, widths), local_ranks[heads])),
        degrees=np.concatenate((widths, np.ones(len(heads), np.int64))),
        slots=np.concatenate((np.arange(num_shared), num_shared + index[heads])),
    )
    return assemble(draft, lengths=lengths, cluster=cluster, planner="balanced/adaptive")
