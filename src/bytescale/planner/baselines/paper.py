"""Algorithm 2 of the paper, DP-Balance and PP-Balance, as published. ``greedy`` is our change of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.plan.plan import offsets_of, segment_sums
from bytescale.planner.baselines.naive import minimal_groups
from bytescale.planner.batch import checked_lengths, longest_first
from bytescale.planner.draft import Draft, assemble


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
