"""Algorithm 2 of the paper, DP-Balance and PP-Balance, as published."""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.plan.plan import segment_sums
from bytescale.planner.aligned import align
from bytescale.planner.batch import checked_lengths, longest_first
from bytescale.planner.draft import Draft, assemble
from bytescale.planner.naive import minimal_groups

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def paper_plan(
    lengths: ArrayLike,
    *,
    cluster: Cluster,
    cost: CostModel,
    num_buckets: int = 8,
    pipeline: bool = False,
    aligned: bool = False,
    delta_seconds: float | None = None,
) -> Plan:
    """Equal tokens per micro-batch, more micro-batches for ranks whose micro-batches are cheap (paper section 6).

    1. Sort by length, descending, and cut into ``num_buckets`` buckets of about equal work.
    2. Inside a bucket, Algorithm 1: fewest ranks for long sequences, best-fit packs of short ones.
    3. Serve the ranks that are furthest behind, until the buckets are empty. A group of D takes the D ranks that are
       furthest behind and starts when the last of them is free: waiting counts as time.

       - DP-Balance draws from the first bucket: at any moment all ranks run micro-batches of like work.
       - PP-Balance (``pipeline``): every rank keeps to one bucket while it lasts, buckets being handed to the ranks in
         turn: a pipeline stays at one length level for long stretches.

    Step 3 is the published loop, sharpened. The published one (``delta_seconds``) goes in rounds: targets are the ranks
    whose accumulated time lags behind the longest by more than delta; in the order of their numbers they get the next
    groups, one each; then targets are looked for anew. Accumulated is the time of a rank's own micro-batches, without
    waiting for group members, so it ends up to 15 % later (benchmarks/paper_tables.py).

    Args:
        lengths: ``[S]`` tokens per sequence.
        cluster: the ranks; the smallest capacity counts for all, speeds scale a rank's time.
        cost: tells the time of a group.
        num_buckets: the paper leaves it open.
        pipeline: PP-Balance instead of DP-Balance.
        delta_seconds: the published loop with this delta, instead of the sharpened one.
        aligned: put the groups on other ranks if a pipeline could hang (``aligned.align``), which the published rule
            does not exclude.
    """
    lengths = checked_lengths(lengths, cluster=cluster, uniform=True)
    buckets = _bucket_groups(lengths, cluster, cost, num_buckets)
    sequences, counts, degrees = (np.concatenate(parts) for parts in zip(*buckets, strict=True))
    bucket_of = np.repeat(np.arange(len(buckets)), [len(bucket[1]) for bucket in buckets])
    seconds = _group_seconds(lengths[sequences], counts, degrees, cost)
    if delta_seconds is None:
        slots, ranks = _serve_furthest_behind(bucket_of, degrees, seconds, 1.0 / cluster.speeds, pipeline)
    else:
        slots, ranks = _serve_in_rounds(bucket_of, degrees, seconds, 1.0 / cluster.speeds, pipeline, delta_seconds)
    draft = Draft(sequences=sequences, sequence_counts=counts, ranks=ranks, degrees=degrees, slots=slots)
    name = "balanced/paper-pp" if pipeline else "balanced/paper"
    plan = assemble(draft, lengths=lengths, cluster=cluster, planner=name)
    return align(plan, cluster=cluster, cost=cost) if aligned else plan


def _bucket_groups(
    lengths: IntArray, cluster: Cluster, cost: CostModel, num_buckets: int
) -> list[tuple[IntArray, IntArray, IntArray]]:
    """Steps 1 and 2: per bucket, ``naive.minimal_groups`` of its sequences. Empty buckets are left out."""
    order = longest_first(lengths)
    work = np.cumsum(cost.work_seconds(lengths[order]))
    shares = np.arange(1, num_buckets) / num_buckets
    edges = np.searchsorted(work, work[-1] * shares)
    parts = [part for part in np.split(order, edges) if len(part)]
    return [minimal_groups(lengths, part, cluster) for part in parts]


def _group_seconds(member_lengths: IntArray, counts: IntArray, degrees: IntArray, cost: CostModel) -> FloatArray:
    """``[G]`` time of each group at reference speed. Groups wider than a node pace at the links between nodes."""
    offsets = np.concatenate(([0], np.cumsum(counts)))
    tokens = segment_sums(member_lengths, offsets)
    squares = segment_sums(member_lengths.astype(np.float64) ** 2, offsets)
    return cost.group_seconds(tokens, squares, degrees, degrees > cost.ranks_per_node)


def _serve_furthest_behind(
    bucket_of: IntArray, degrees: IntArray, seconds: FloatArray, slowness: FloatArray, pipeline: bool
) -> tuple[IntArray, IntArray]:
    """Step 3: slot of each group ``[G]``, and the ranks of all groups, group by group ``[E]``."""
    num_ranks, num_buckets = len(slowness), int(bucket_of[-1]) + 1
    queues = [deque(np.flatnonzero(bucket_of == bucket).tolist()) for bucket in range(num_buckets)]
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


def _serve_in_rounds(
    bucket_of: IntArray,
    degrees: IntArray,
    seconds: FloatArray,
    slowness: FloatArray,
    pipeline: bool,
    delta_seconds: float,
) -> tuple[IntArray, IntArray]:
    """Step 3 as published. Returns as ``_serve_furthest_behind``."""
    num_ranks, num_buckets = len(slowness), int(bucket_of[-1]) + 1
    queues = [deque(np.flatnonzero(bucket_of == bucket).tolist()) for bucket in range(num_buckets)]
    bucket_of_rank = np.arange(num_ranks) % num_buckets if pipeline else np.zeros(num_ranks, dtype=np.int64)
    accumulated = np.zeros(num_ranks)
    order: list[int] = []
    members: list[IntArray] = [np.zeros(0, dtype=np.int64)] * len(degrees)
    while len(order) < len(degrees):
        targets = np.flatnonzero(accumulated < accumulated.max() - delta_seconds)
        if not len(targets):
            targets = np.arange(num_ranks)
        place = 0
        while place < len(targets) and len(order) < len(degrees):
            bucket = int(bucket_of_rank[targets[place]])
            while not queues[bucket]:
                bucket = (bucket + 1) % num_buckets
            degree = int(degrees[queues[bucket][0]])
            ranks = targets[place : place + degree]
            if len(ranks) < degree and place:
                break  # the rest of this round's targets is too few for it
            if len(ranks) < degree:  # and so are all of them: the ranks that are furthest behind
                ranks = np.sort(np.argsort(accumulated, kind="stable")[:degree])
            group = queues[bucket].popleft()
            accumulated[ranks] += seconds[group] * slowness[ranks].max()
            bucket_of_rank[ranks] = bucket
            members[group] = ranks
            order.append(group)
            place += degree
    slots = np.empty(len(degrees), dtype=np.int64)
    slots[order] = np.arange(len(order))
    return slots, np.concatenate(members)
