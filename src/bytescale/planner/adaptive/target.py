"""The batch that is planned, the time at which all ranks could end together, and the two numbers that are searched.

Shape letters: S sequences, longest first; L of them may have to be shared; R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan import Plan
from bytescale.planner.adaptive.degrees import (
    DegreeGrid,
    Rectangles,
    block_seconds,
    degrees_within,
    fastest_seconds,
    is_ideal,
)
from bytescale.planner.adaptive.effort import LEVELS, PRECISION, SIMULATED, TIMED
from bytescale.planner.evaluate import evaluate


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The data that all trials of a batch share."""

    lengths: IntArray  # [S] longest first
    cluster: Cluster
    cost: CostModel
    num_stages: int
    pack_tokens: int  # most tokens of whole sequences in one micro-batch
    tried: DegreeGrid  # of this cost model, on as many ranks
    context: int = 0  # tokens that a static mesh has to hold
    step_seconds: Callable[[Plan], float] | None = None  # the time of a plan's step; None: its makespan

    @staticmethod
    def of(lengths: IntArray, cluster: Cluster, cost: CostModel) -> Batch:
        """The batch of ``lengths`` ``[S]``, longest first, without a pipeline and with packs as large as ranks hold."""
        capacity = int(cluster.capacity_tokens.min() if cluster.is_uniform else cluster.capacity_tokens.max())
        tried = DegreeGrid(cost, cluster.num_ranks)
        return Batch(lengths=lengths, cluster=cluster, cost=cost, num_stages=1, pack_tokens=capacity, tried=tried)

    def makespan(self, plan: Plan) -> float:
        """Seconds of the plan, without the reduction of gradients and the gathering of parameters."""
        return evaluate(plan, cluster=self.cluster, cost=self.cost, num_stages=self.num_stages).end_seconds

    def step(self, plan: Plan) -> float:
        """Seconds by which plans are compared."""
        return self.makespan(plan) if self.step_seconds is None else self.step_seconds(plan)

    @property
    def num_timed(self) -> int:
        """Trials of a pipeline that are worth the time of ``step``; 0 if not even baselines are."""
        if self.step_seconds is None:
            return 1
        micro_batches = int(self.lengths.sum()) // self.pack_tokens + self.cluster.num_ranks
        return min(TIMED, SIMULATED // (2 * self.num_stages * micro_batches))

    @cached_property
    def rings(self) -> Batch | None:
        """The batch in whose plans all groups are rings. None where that is no choice, as ``cost`` has no grids."""
        if self.cost.row_bytes_per_token is None or is_ideal(self.cost):
            return None
        cost = replace(self.cost, row_bytes_per_token=None)
        return replace(self, cost=cost, tried=DegreeGrid(cost, self.cluster.num_ranks))

    @cached_property
    def fewest(self) -> IntArray:
        """``[S]`` a lower bound of the ranks that hold each; on equal ranks, the fewest that do."""
        if self.cluster.is_uniform:
            return self.cluster.fewest_ranks(self.lengths)
        return -(-self.lengths // int(self.cluster.capacity_tokens.max()))

    @cached_property
    def work_seconds(self) -> FloatArray:
        """``[S]`` time on one rank of speed 1, with a share of g, the fixed time of a micro-batch."""
        tokens = min(float(self.cluster.capacity_tokens.mean()), self.pack_tokens)
        return self.cost.work_seconds(self.lengths) + self.lengths * (self.cost.micro_batch_seconds / tokens)

    @cached_property
    def local_seconds(self) -> FloatArray:
        """``[S]`` time of each sequence on the fastest rank that holds it."""
        if self.cluster.is_uniform:
            return self.work_seconds
        by_capacity = np.argsort(-self.cluster.capacity_tokens, kind="stable")
        fastest = np.maximum.accumulate(self.cluster.speeds[by_capacity])
        holding = np.searchsorted(-self.cluster.capacity_tokens[by_capacity], -self.lengths, side="right")
        return self.work_seconds / np.where(holding > 0, fastest[np.maximum(holding, 1) - 1], 1.0)

    @cached_property
    def target(self) -> float:
        """Seconds; when all ranks could end together, without the bubbles of a pipeline."""
        if not self.cluster.is_uniform:
            return float(self.work_seconds.sum() / self.cluster.speeds.sum())
        count = self.num_shared(float(self.work_seconds.sum()) / self.cluster.num_ranks)
        rest = float(self.work_seconds[count:].sum())
        return target_seconds(self.tried, self.lengths[:count], self.fewest[:count], rest)

    @cached_property
    def fastest(self) -> float:
        """Seconds of the longest sequence on its fastest number of equal ranks: no plan of such groups ends earlier."""
        return fastest_seconds(self.tried, int(self.lengths[0]), int(self.fewest[0]))

    @cached_property
    def stays_whole(self) -> bool:
        """Whether no sequence, not even the longest, delays several equal ranks less than one, in a pack of others."""
        if not self.cluster.is_uniform or self.num_stages > 1 or self.fewest[0] > 1:
            return False
        return self.fastest >= float(self.work_seconds[0])

    def pack_seconds(self, count: int) -> float:
        """Time of a micro-batch of whole sequences, in seconds, if the ``count`` longest sequences are shared.

        It is the mean, weighted by tokens, of micro-batches as full as the sequences can make them.
        """
        lengths = self.lengths[count:]
        if not len(lengths):
            return 0.0
        tokens = int(lengths.sum())
        pack = min(self.pack_tokens, max(int(lengths[0]), -(-tokens // self.cluster.num_ranks)))
        return float(self.local_seconds[count:].sum()) / tokens * pack

    def num_shared(self, limit: float) -> int:
        """Number of the longest sequences that no rank can hold, or that no rank ends within ``limit`` seconds."""
        too_long = int(np.searchsorted(-self.fewest, -1)) if self.cluster.is_uniform else self.num_crowded
        return max(too_long, int(np.searchsorted(-self.local_seconds, -limit)))

    @cached_property
    def num_crowded(self) -> int:
        """Number of the longest sequences that ranks which differ have to share because too few ranks hold them.

        It is the smallest n for which the sequences after the n-th take no more time than those ranks have that hold
        them. Shared sequences are taken to lie evenly on all ranks, so whole ones may fill the same part of each rank::

            C_i - C_n <= v_i (C - C_n)  for all i > n        C_i: work of the i longest sequences, C of all
                                                             v_i: share of all speeds of the ranks that hold the i-th
        """
        by_capacity = np.argsort(-self.cluster.capacity_tokens, kind="stable")
        speeds = np.concatenate(([0.0], np.cumsum(self.cluster.speeds[by_capacity])))
        holding = np.searchsorted(-self.cluster.capacity_tokens[by_capacity], -self.lengths, side="right")
        share, work = speeds[holding] / speeds[-1], np.cumsum(self.work_seconds)
        is_limited = holding < len(speeds) - 1
        needed = (work - share * work[-1]) * is_limited / np.where(is_limited, 1.0 - share, 1.0)
        most_needed = np.maximum.accumulate(needed[::-1])[::-1]
        return int(np.argmax(np.append(work - self.work_seconds >= most_needed, True)))

    def longest_blocks(self) -> list[float]:
        """Longest blocks that are tried in a pipeline, in seconds: ``LEVELS``, and times of the longest sequence."""
        pack = self.pack_seconds(self.num_shared(np.inf))
        shortest = min(max(pack / 64, 1e-3 * self.target), self.target)
        ranks = np.unique(np.geomspace(self.fewest[0], self.cluster.num_ranks, LEVELS).round().astype(np.int64))
        of_longest = block_seconds(self.cost, np.full(len(ranks), self.lengths[0]), ranks)
        return [*np.geomspace(self.target, shortest, LEVELS).tolist(), *of_longest[of_longest >= shortest].tolist()]

    def promised(self, blocks: Rectangles) -> float:
        """The makespan in a pipeline, in seconds, with these groups on the fewest ranks of each.

        It is about ( sum of D t + whole + (p - 1) * sum over R ranks of the longest t on each ) / R (``evaluate``).
        Long groups are stacked on long groups, so each rank pays for one of the groups with the largest t.
        """
        num_ranks, count, degrees, seconds = self.cluster.num_ranks, len(blocks.items), blocks.degrees, blocks.seconds
        by_time = np.argsort(-seconds, kind="stable")
        paying = np.diff(np.minimum(np.cumsum(degrees[by_time]), num_ranks), prepend=0)
        bubbles = float((paying * seconds[by_time]).sum())
        bubbles += (num_ranks - int(paying.sum())) * self.pack_seconds(count)
        work = float((degrees * seconds).sum() + self.local_seconds[count:].sum())
        slowest = max(float(seconds.max(initial=0.0)), float(self.local_seconds[count:].max(initial=0.0)))
        return max((work + (self.num_stages - 1) * bubbles) / num_ranks, self.num_stages * slowest)


def target_seconds(tried: DegreeGrid, long_lengths: IntArray, fewest: IntArray, whole_seconds: float) -> float:
    """The earliest makespan if all work could be spread evenly, exposed communication included.

    It is the smallest T for which the time of all ranks, R T, is as much as all sequences take: whole ones
    ``whole_seconds`` in sum, and those of ``long_lengths [L]``, which ``fewest [L]`` ranks hold, their degree times the
    time on it, for the degree that T requires. T is never less than the longest one's time on its fastest degree.
    """
    cost, num_ranks = tried.cost, tried.num_ranks
    work = float(cost.work_seconds(long_lengths).sum())
    target = (work + whole_seconds) / num_ranks
    if len(long_lengths) == 0:
        return target
    if is_ideal(cost) and cost.micro_batch_seconds == 0:
        return target
    target = max(target, fastest_seconds(tried, int(long_lengths[0]), int(fewest[0])))

    def needed(seconds: float) -> float:
        degrees, taken = degrees_within(tried, long_lengths, fewest, seconds)
        return (float((degrees * taken).sum()) + whole_seconds) / num_ranks

    too_early, enough = target, needed(target)
    while enough > PRECISION * too_early:
        middle = math.sqrt(too_early * enough)
        if needed(middle) <= middle:
            enough = middle
        else:
            too_early = middle
    return max(enough, target)
