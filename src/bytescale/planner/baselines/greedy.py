"""Algorithm 2 of the paper with a different step 3: the ranks that are free first are served first."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import ArrayLike

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.planner.baselines.paper import BucketedGroups
from bytescale.planner.batch import checked_lengths


def greedy_plan(lengths: ArrayLike, *, cluster: Cluster, cost: CostModel, num_buckets: int = 8) -> Plan:
    """Algorithm 2 of the paper (``paper_plan``) with a greedy step 3.

    3. Bucket by bucket, the next group, of D ranks, takes the D ranks that are free first. It starts when the last of
       them is free, so the time for which the other members wait counts as busy time.

    The published step 3 serves ranks in rounds and counts only the time of a rank's own micro-batches, so its plans end
    later (docs/benchmarks.md). With one bucket this is list scheduling, longest sequence first.

    Args: as ``paper_plan``.
    """
    lengths = checked_lengths(lengths, cluster=cluster, uniform=True)
    groups = BucketedGroups.of(lengths, cluster, cost, num_buckets)
    slots, ranks = np.arange(len(groups.degrees)), _serve_furthest_behind(groups, 1.0 / cluster.speeds)
    return groups.plan(slots, ranks, cluster=cluster, planner="greedy")


def _serve_furthest_behind(groups: BucketedGroups, slowness: FloatArray) -> IntArray:
    """Step 3: the ranks of all groups, group by group ``[E]``."""
    behind = [(0.0, rank) for rank in range(len(slowness))]  # a heap of (accumulated seconds, rank)
    members: list[int] = []
    for degree, seconds in zip(groups.degrees.tolist(), groups.seconds.tolist(), strict=True):
        served = [heapq.heappop(behind) for _ in range(degree)]
        ranks = sorted(rank for _, rank in served)
        free = max(time for time, _ in served) + seconds * max(slowness[rank] for rank in ranks)
        for rank in ranks:
            heapq.heappush(behind, (float(free), rank))
        members += ranks
    return np.array(members, dtype=np.int64)
