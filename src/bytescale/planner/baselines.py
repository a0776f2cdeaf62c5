"""The planners with which ours are compared: the paper's Algorithms 1 and 2, a change of the latter, a static mesh."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.common.errors import PlanError
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan import Plan
from bytescale.plan.plan import concatenated_ranges, offsets_of, segment_sums
from bytescale.planner.batch import checked_lengths, longest_first
from bytescale.planner.draft import Draft, assemble
from bytescale.planner.packing import best_fit, grouped


def naive_plan(lengths: ArrayLike, *, cluster: Cluster, cost: CostModel | None = None) -> Plan:
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
    by_kind = np.argsort(lengths <= cluster.capacity_tokens.min(), kind="stable")  # long ones first, as they arrived
    sequences, counts, degrees = minimal_groups(lengths, by_kind, cluster)
    by_arrival = np.argsort(sequences[np.cumsum(counts) - counts])  # of the first sequence
    first = np.empty_like(degrees)
    first[by_arrival] = np.cumsum(degrees[by_arrival]) - degrees[by_arrival]
    draft = Draft(
        sequences=sequences,
        sequence_counts=counts,
        ranks=concatenated_ranges(first, first + degrees) % cluster.num_ranks,
        degrees=degrees,
        slots=np.argsort(by_arrival),
    )
    return assemble(draft, lengths=lengths, cluster=cluster, planner="naive")


def minimal_groups(lengths: IntArray, order: IntArray, cluster: Cluster) -> tuple[IntArray, IntArray, IntArray]:
    """Steps 1 and 2 for the sequences ``order``, which begins with those that are longer than the capacity.

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


def paper_plan(
    lengths: ArrayLike,
    *,
    cluster: Cluster,
    cost: CostModel,
    num_buckets: int = 8,
    pipeline: bool = False,
    delta_seconds: float | None = None,
) -> Plan:
    """Equal tokens per micro-batch, more micro-batches for ranks whose micro-batches are cheap (paper section 6).

    1. Sort by length, descending, and cut into ``num_buckets`` buckets of about equal work.
    2. Inside a bucket, Algorithm 1: fewest ranks for long sequences, best-fit packs of short ones.
    3. In rounds, until the buckets are empty: the target ranks are those whose accumulated time (without waiting) lags
       behind the longest by more than delta; where there are none, all. In the order of their numbers they get the next
       groups, one each.

       - DP-Balance draws from the first bucket: at any moment all ranks run micro-batches of like work.
       - PP-Balance (``pipeline``): every rank keeps to one bucket while it lasts, buckets being handed to the ranks in
         turn.

    Args:
        lengths: ``[S]`` tokens per sequence.
        cluster: the ranks; the smallest capacity counts for all, speeds scale a rank's time.
        num_buckets: the paper leaves it open.
        pipeline: PP-Balance instead of DP-Balance. Its plans can hang in a pipeline: ``aligned`` moves their groups.
        delta_seconds: the paper leaves it open too; None: the time of one full micro-batch of one rank.
    """
    lengths = checked_lengths(lengths, cluster=cluster, uniform=True)
    groups = BucketedGroups.of(lengths, cluster, cost, num_buckets)
    if delta_seconds is None:
        capacity = int(cluster.capacity_tokens.min())
        delta_seconds = float(cost.group_seconds(capacity, capacity**2, 1))
    slots, ranks = _serve_in_rounds(groups, 1.0 / cluster.speeds, pipeline, delta_seconds)
    return groups.plan(slots, ranks, cluster=cluster, planner="paper-pp" if pipeline else "paper")


@dataclass(frozen=True, eq=False)
class BucketedGroups:
    """What steps 1 and 2 make of a batch: G groups, bucket by bucket."""

    lengths: IntArray  # [S] tokens per sequence of the batch
    sequences: IntArray  # [S] sequence numbers, group by group
    counts: IntArray  # [G] sequences per group
    degrees: IntArray  # [G] ranks per group
    seconds: FloatArray  # [G] time of each group at reference speed
    bucket_of: IntArray  # [G] the bucket of each group, ascending; empty buckets have no number

    @staticmethod
    def of(lengths: IntArray, cluster: Cluster, cost: CostModel, num_buckets: int) -> BucketedGroups:
        """Steps 1 and 2 of Algorithm 2."""
        order = longest_first(lengths)
        work = np.cumsum(cost.work_seconds(lengths[order]))
        edges = np.searchsorted(work, work[-1] * (np.arange(1, num_buckets) / num_buckets))
        parts = [part for part in np.split(order, edges) if len(part)]
        buckets = [minimal_groups(lengths, part, cluster) for part in parts]
        sequences, counts, degrees = (np.concatenate(arrays) for arrays in zip(*buckets, strict=True))
        offsets, members = offsets_of(counts), lengths[sequences]
        tokens, squares = segment_sums(members, offsets), segment_sums(cost.squares_of(members), offsets)
        return BucketedGroups(
            lengths=lengths,
            sequences=sequences,
            counts=counts,
            degrees=degrees,
            seconds=cost.group_seconds(tokens, squares, degrees, degrees > cost.ranks_per_node),
            bucket_of=np.repeat(np.arange(len(buckets)), [len(bucket[1]) for bucket in buckets]),
        )

    def plan(self, slots: IntArray, ranks: IntArray, *, cluster: Cluster, planner: str) -> Plan:
        """The plan with group g in slot ``slots[g]``; ``ranks`` ``[E]`` are the ranks of all groups, group by group."""
        draft = Draft(
            sequences=self.sequences, sequence_counts=self.counts, ranks=ranks, degrees=self.degrees, slots=slots
        )
        return assemble(draft, lengths=self.lengths, cluster=cluster, planner=planner)


def _serve_in_rounds(
    groups: BucketedGroups, slowness: FloatArray, pipeline: bool, delta_seconds: float
) -> tuple[IntArray, IntArray]:
    """Step 3: slot of each group ``[G]``, and the ranks of all groups, group by group ``[E]``."""
    degrees, seconds, num_ranks, num_buckets = groups.degrees, groups.seconds, len(slowness), groups.bucket_of[-1] + 1
    queues = [deque(np.flatnonzero(groups.bucket_of == bucket).tolist()) for bucket in range(num_buckets)]
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


def static_plan(
    lengths: ArrayLike, *, cluster: Cluster, cost: CostModel | None = None, cp: int | None = None, context: int = 0
) -> Plan:
    """Pack sequences to the context length, and shard every sequence of a pack over all ranks of one mesh row.

    1. The mesh has R / cp rows of ``cp`` consecutive ranks.
    2. Sequences are packed, longest first by best fit, into packs of cp * C tokens. A sequence counts as
       ``ceil(s / cp)`` tokens on every rank, its largest slice.
    3. Packs are assigned to the rows in turn.

    Args:
        lengths: ``[S]`` tokens per sequence.
        cluster: the ranks; the smallest capacity limits all of them.
        cost: ignored; it is a parameter so that all planners are called alike.
        cp: context-parallel degree, a divisor of R; None: the smallest that holds the context.
        context: longest sequence that the mesh has to hold, if it is longer than the batch's longest.

    Raises:
        PlanError: for an impossible batch or a ``cp`` that does not divide R or cannot hold the longest sequence.
    """
    del cost
    lengths = checked_lengths(lengths, cluster=cluster, uniform=True)
    num_ranks, capacity, longest = cluster.num_ranks, int(cluster.capacity_tokens.min()), int(lengths.max())
    if cp is None:
        divisors = (cp for cp in range(1, num_ranks + 1) if num_ranks % cp == 0)
        cp = next((cp for cp in divisors if cp * capacity >= max(longest, context)), num_ranks)
    if cp < 1 or num_ranks % cp:
        raise PlanError(
            f"cp = {cp} does not divide the {num_ranks} ranks",
            so="the mesh would have a hole",
            fix="use a divisor, or the adaptive planner, which needs none",
        )
    if cp * capacity < longest:
        raise PlanError(
            f"a sequence of {longest} tokens exceeds cp = {cp} x {capacity} tokens",
            so="no row of the mesh could hold it",
            fix=f"raise cp to at least {-(-longest // capacity)}",
        )
    order = longest_first(lengths)
    packs = best_fit(-(-lengths[order] // cp), capacity)
    sequences, counts = grouped(order, packs)
    number, degrees = np.arange(len(counts)), np.full(len(counts), cp)
    first = number % (num_ranks // cp) * cp
    draft = Draft(
        sequences=sequences,
        sequence_counts=counts,
        ranks=concatenated_ranges(first, first + cp),
        degrees=degrees,
        slots=number,
    )
    return assemble(draft, lengths=lengths, cluster=cluster, planner=f"static/cp{cp}")
