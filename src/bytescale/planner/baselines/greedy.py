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


def greedy_plan(
    lengths: ArrayLike,
    *,
    cluster: Cluster,
    cost: CostModel,
    num_buckets: int = 8,
    pipeline: bool = False,
) -> Plan:
    """Algorithm 2 of the paper (``paper_plan``) with a greedy step 3.

    3. Until the buckets are empty, the next group, of D ranks, takes the D ranks that are free first. It starts when
       the last of them is free, so the time for which the other members wait counts as busy time.

    The published step 3 serves ranks in rounds and counts only the time of a rank's own micro-batches, so its plans end
    later (docs/benchmarks.md). With one bucket this is list scheduling, longest sequence first.

    Args: as ``paper_plan``.
    """
    lengths = checked_lengths(lengths, cluster=cluster, uniform=True)
    groups = BucketedGroups.of(lengths, cluster, cost, num_buckets)
    slots, ranks = _serve_furthest_behind(groups, 1.0 / cluster.speeds, pipeline)
    return groups.plan(slots, ranks, cluster=cluster, planner="greedy-pp" if pipeline else "greedy")


def _serve_furthest_behind(groups: BucketedGroups, slowness: FloatArray, pipeline: bool) -> tuple[IntArray, IntArray]:
    """Step 3: slot of each group ``[G]``, and the ranks of all groups, group by group ``[E]``."""
    degrees, seconds, queues = groups.degrees, groups.seconds, groups.queues()
    num_ranks, num_buckets = len(slowness), len(queues)
    bucket_of_rank = [rank % num_buckets if pipeline else 0 for rank in range(num_ranks)]
    behind = [(0.0, rank) for rank in range(num_ranks)]  # a heap of (accumulated seconds, rank)
    members: list[list[int]] = [[]] * len(degrees)
    slots = np.empty(len(degrees), dtype=np.int64)
    for slot in range(len(degrees)):
        bucket = bucket_of_rank[behind[0][1]]
        while not queues[bucket]:
            bucket = (bucket + 1) % num_buckets
        group = queues[bucket].popleft()
        served = [heapq.heappop(behind) for _ in range(degrees[group])]
        ranks = sorted(rank for _, rank in served)
        free = max(time for time, _ in served) + seconds[group] * max(slowness[rank] for rank in ranks)
        for rank in ranks:
            bucket_of_rank[rank] = bucket
            heapq.heappush(behind, (float(free), rank))
        members[group], slots[group] = ranks, slot
    return slots, np.fromiter((rank for ranks in members for rank in ranks), dtype=np.int64)
