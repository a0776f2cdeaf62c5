"""A scheduler for Megatron-Core's dynamic context parallelism (``hybrid_context_parallel``), in the place of its own::

    wrapper = HybridCPDataLoaderWrapper(data_iterator, config)  # of megatron.core.datasets.data_schedule
    wrapper.cp_balancing_scheduler = AdaptiveCPScheduler(config.max_seqlen_per_dp_cp_rank, wrapper.dp_cp_group)

Megatron 0.16 runs the samples of a batch one by one, each on a context-parallel group that it has made at its start:
runs of 2, 4, 8, ... consecutive ranks that begin at multiples of their size, or all ranks. Its own scheduler gives a
sample the fewest ranks that can hold it, and ends a phase, with a barrier behind it, where a smaller group is to
follow.

This one gives a sample as many ranks as it needs to end in time, and makes a single phase of the whole batch, with one
barrier. Every rank runs its larger groups before its smaller ones. All ranks of a group have then run the same samples
whenever its next one starts: they have the same time behind them, nobody waits, and no order can hang. So the least
loaded group gets the next sample, longest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.common.errors import ConfigError
from bytescale.cost.model import CostModel

STRETCH = (1.0, 1.03, 1.1, 1.25, 1.5, 2.0, 4.0, np.inf)
"""Ends that are tried, over the least that is possible. More ranks a sample cost messages; fewer, balance."""

NEARLY = 1.005
"""Of the trials that end within this factor of the earliest, the one with the least traffic is taken."""


class AdaptiveCPScheduler:
    """Takes the place of Megatron-Core 0.16's ``BalancedCPScheduler``.

    Args:
        max_seq_len_per_rank: tokens of a sample that a rank holds.
        dp_cp_group: all ranks of data and context parallelism, of which ``size()`` is asked alone.
        cost: seconds of a sample on any number of ranks, e.g. ``bytescale.cost.profile.load_profile(...)``'s. The
            default is work of s^2 + 24576 s, about that of a model of 7B, and messages that take no time.
    """

    def __init__(self, max_seq_len_per_rank: int, dp_cp_group: Any, *, cost: CostModel | None = None) -> None:
        self.max_seq_len_per_rank = max_seq_len_per_rank
        self.cost = cost or CostModel.from_work()
        self.num_ranks = dp_cp_group.size()
        powers = [2**i for i in range(max(1, int(np.log2(self.num_ranks))))]
        self.degrees = np.array(sorted({*powers, self.num_ranks}))
        """Sizes of the groups that Megatron has made, rising."""

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]], config: Any = None
    ) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
        """Schedule one global batch: the number and the tokens of every sample. Megatron's ``config`` is not used.

        Returns for the only phase and each rank the lengths of its samples, and their numbers, in the order of running.
        Raises ``ConfigError`` if there are no samples, or all ranks together cannot hold one of them.
        """
        samples = np.array(sorted(sample_id_seqlens, key=lambda sample: (-sample[1], sample[0])), dtype=np.int64)
        if not len(samples):
            raise ConfigError("a batch has no samples", so="Megatron runs at least one on every rank", fix="drop it")
        if samples[0, 1] > self.max_seq_len_per_rank * self.num_ranks:
            raise ConfigError(
                f"a sample of {samples[0, 1]} tokens is longer than {self.num_ranks} ranks of "
                f"{self.max_seq_len_per_rank} tokens hold",
                fix="raise max_seqlen_per_dp_cp_rank, or cut the sample",
            )
        lengths = samples[:, 1]
        starts, degrees = self._schedule(lengths, self._seconds(lengths))
        rows: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for row in np.argsort(-degrees, kind="stable"):
            for rank in range(starts[row], starts[row] + degrees[row]):
                rows[rank].append(int(row))
        return [[lengths[row].tolist() for row in rows]], [[samples[row, 0].tolist() for row in rows]]

    def _seconds(self, lengths: IntArray) -> FloatArray:
        """``[S, D]`` seconds of each sample on each number of ranks; infinite where they cannot hold it."""
        degrees = self.degrees
        squares = self.cost.squares_of(lengths)[:, None]
        far = degrees > self.cost.ranks_per_node
        seconds = self.cost.group_seconds(lengths[:, None], squares, degrees, far)
        return np.where(lengths[:, None] <= self.max_seq_len_per_rank * degrees, seconds, np.inf)

    def _schedule(self, lengths: IntArray, seconds: FloatArray) -> tuple[IntArray, IntArray]:
        """``[S]`` the first rank and the number of ranks of each sample, from ``[S, D]`` ``seconds``."""
        least = max(float((seconds * self.degrees).min(axis=1).sum()) / self.num_ranks, seconds.min(axis=1).max())
        trials = []
        for stretch in STRETCH:
            in_time = np.isfinite(seconds) & (seconds <= stretch * least)
            columns = np.where(in_time.any(axis=1), in_time.argmax(axis=1), seconds.argmin(axis=1))
            trials.append(self._placed(columns, seconds))
        soon = NEARLY * min(end for (end, _), _, _ in trials)
        _, starts, degrees = min((t for t in trials if t[0][0] <= soon), key=lambda trial: trial[0][1])
        return starts, degrees

    def _placed(self, columns: IntArray, seconds: FloatArray) -> tuple[tuple[float, int], IntArray, IntArray]:
        """The end and the traffic of samples on ``degrees[columns]`` ranks; their first ranks; their numbers of ranks.

        While a rank has nothing to do, the sample that takes longest gets more ranks.
        """
        columns = columns.copy()
        while True:
            loads, starts = self._deal(columns, seconds)
            taken = seconds[np.arange(len(columns)), columns]
            wider = columns < len(self.degrees) - 1
            if loads.min() > 0 or not wider.any():
                break
            columns[int(np.where(wider, taken, -1.0).argmax())] += 1
        degrees = self.degrees[columns]
        return (float(loads.max()), int(degrees.sum())), starts, degrees

    def _deal(self, columns: IntArray, seconds: FloatArray) -> tuple[FloatArray, IntArray]:
        """``[R]`` seconds of each rank, and ``[S]`` the first rank of each sample."""
        loads = np.zeros(self.num_ranks)
        starts = np.zeros(len(columns), dtype=np.int64)
        for column in range(len(self.degrees) - 1, -1, -1):
            degree = int(self.degrees[column])
            firsts = range(0, self.num_ranks - degree + 1, degree)
            free = [(float(loads[first]), first) for first in firsts]
            heapq.heapify(free)
            for row in np.flatnonzero(columns == column):
                load, first = free[0]
                starts[row] = first
                loads[first : first + degree] = load + seconds[row, column]
                heapq.heapreplace(free, (float(loads[first]), first))
        return loads, starts
