"""The plan of one global batch: which rank runs which tokens, with which other ranks, in which order.

A global batch is a list of sequences, numbered 0..S-1, of ``lengths`` tokens. A plan has three levels.

* A **slice group** is a set of sequences sharded over the same ranks. On one rank, its sequences are whole and cause no
  traffic (a *local* group, or pack). On several ranks the group is *shared*: its members form a grid of rows, which
  share queries, and columns, which share keys (``attention.rings.grid``). A grid of one column is a ring. A group's
  number is its place in ONE total order: every rank runs its shared groups in rising order, so no two ranks ever wait
  for each other.
* A **micro-batch** of a rank consists of at most one slice of a shared group and any number of local groups. Together
  they hold at most the rank's capacity in tokens.
* A **rank** (an HDP rank; a whole pipeline when pp > 1) runs its micro-batches in order. Ranks may have different
  numbers of them, or none.
* A **lockstep domain** is a run of ``domain`` consecutive ranks that gather parameters together in every pass.
  Micro-batch i of a rank belongs to **round** i, and every shared group is in one round on all its members. A rank with
  fewer micro-batches takes part in the last rounds without work. With ``domain = 1`` ranks run free.

All data are NumPy arrays (a batch may hold 10^6 sequences, a cluster 16,384 ranks); ``RankPlan`` is one rank's view.
``offsets`` arrays are CSR offsets: the items of thing ``i`` are ``items[offsets[i]:offsets[i + 1]]``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bytescale.common.arrays import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """One global batch's plan. Shape letters: S sequences, G groups, R ranks, M micro-batches of all ranks together.

    ``capacity_tokens`` and ``lengths`` are in tokens. ``group_offload_ratio`` is the share r of a group's tokens whose
    activations are sent to host memory (Eq. 3). ``group_weights`` are the integer shares of the members, all 1 unless
    members differ in speed (``plan.layout``). ``group_columns`` is the number Q of columns of the group's grid, which
    divides its number of ranks; 1 is a ring. Members are numbered row by row: member ``p Q + q`` is in row p, column q.
    """

    lengths: IntArray  # [S] tokens of each sequence
    capacity_tokens: IntArray  # [R] tokens that one micro-batch of a rank may hold
    group_sequence_offsets: IntArray  # [G + 1] into group_sequences
    group_sequences: IntArray  # [S] sequence numbers, each exactly once
    group_rank_offsets: IntArray  # [G + 1] into group_ranks and group_weights
    group_ranks: IntArray  # [sum of group sizes] in member order
    group_weights: IntArray  # [sum of group sizes]
    group_columns: IntArray  # [G] columns of the grid
    group_offload_ratio: NDArray[np.float64]  # [G] in [0, 1]
    rank_micro_batch_offsets: IntArray  # [R + 1] numbers of a rank's micro-batches, in execution order
    micro_batch_group_offsets: IntArray  # [M + 1] into micro_batch_groups
    micro_batch_groups: IntArray  # [sum of group sizes] group numbers; a shared group comes first
    planner: str = field(default="")  # name of the planner, for people: "adaptive"
    domain: int = 1  # consecutive ranks that run in lockstep; divides the number of ranks

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_ranks(self) -> int:
        return len(self.capacity_tokens)

    @property
    def num_groups(self) -> int:
        return len(self.group_sequence_offsets) - 1

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batch_group_offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def group_sizes(self) -> IntArray:
        """``[G]`` number of ranks of each group (the degree D)."""
        return np.diff(self.group_rank_offsets)

    @property
    def group_tokens(self) -> IntArray:
        """``[G]`` tokens of all sequences of each group, over all its members."""
        return segment_sums(self.lengths[self.group_sequences], self.group_sequence_offsets)

    @property
    def micro_batch_ranks(self) -> IntArray:
        """``[M]`` the rank that runs each micro-batch."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.rank_micro_batch_offsets))

    @property
    def micro_batch_rounds(self) -> IntArray:
        """``[M]`` the place of each micro-batch in its rank's order."""
        counts = np.diff(self.rank_micro_batch_offsets)
        return np.arange(self.num_micro_batches) - np.repeat(self.rank_micro_batch_offsets[:-1], counts)

    @property
    def rank_rounds(self) -> IntArray:
        """``[R]`` rounds in which each rank takes part: the most micro-batches of a rank of its domain."""
        counts = np.diff(self.rank_micro_batch_offsets)
        return np.repeat(counts.reshape(-1, self.domain).max(axis=1), self.domain)

    def apart(self) -> IntArray:
        """Numbers of the shared groups that are in different rounds on their members; none in an aligned plan."""
        heads = self.micro_batch_groups[self.micro_batch_group_offsets[:-1]]
        lowest, highest = np.full(self.num_groups, np.iinfo(np.int64).max), np.full(self.num_groups, -1)
        np.minimum.at(lowest, heads, self.micro_batch_rounds)
        np.maximum.at(highest, heads, self.micro_batch_rounds)
        return np.flatnonzero(lowest < highest)

    def sequences_of(self, group: int) -> IntArray:
        """Sequence numbers of one group, in the order in which members hold them."""
        return self.group_sequences[self.group_sequence_offsets[group] : self.group_sequence_offsets[group + 1]]

    def ranks_of(self, group: int) -> IntArray:
        """Ranks of one group, in member order."""
        return self.group_ranks[self.group_rank_offsets[group] : self.group_rank_offsets[group + 1]]

    def weights_of(self, group: int) -> IntArray:
        """Integer shares of one group's members, in member order."""
        return self.group_weights[self.group_rank_offsets[group] : self.group_rank_offsets[group + 1]]

    def groups_of(self, micro_batch: int) -> IntArray:
        """Group numbers of one micro-batch (numbered over all ranks), a shared one first."""
        offsets = self.micro_batch_group_offsets
        return self.micro_batch_groups[offsets[micro_batch] : offsets[micro_batch + 1]]

    def micro_batches_of(self, rank: int) -> range:
        """Numbers of one rank's micro-batches, in execution order."""
        return range(int(self.rank_micro_batch_offsets[rank]), int(self.rank_micro_batch_offsets[rank + 1]))

    def digest(self) -> int:
        """A 63-bit fingerprint of the plan. Ranks compare it before they start a step."""
        content = hashlib.blake2b(f"domain {self.domain}".encode(), digest_size=8)
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, np.ndarray):
                content.update(spec.name.encode())
                content.update(np.ascontiguousarray(value).tobytes())
        return int.from_bytes(content.digest(), "little") >> 1

    @staticmethod
    def build(
        *,
        lengths: ArrayLike,
        capacity_tokens: ArrayLike,
        groups: Sequence[GroupSpec],
        schedule: Sequence[Sequence[Sequence[int]]],
        planner: str = "",
        domain: int = 1,
    ) -> Plan:
        """Make a plan from Python objects, for tests and for planners that use them.

        Args:
            lengths: ``[S]`` tokens per sequence.
            capacity_tokens: ``[R]``.
            groups: slice groups in the plan's total order; a group's number is its place here.
            schedule: per rank, per micro-batch, the numbers of its groups (a shared one first).
            domain: consecutive ranks that run in lockstep.
        """
        micro_batches = [micro_batch for rank in schedule for micro_batch in rank]
        return Plan(
            lengths=np.asarray(lengths, dtype=np.int64),
            capacity_tokens=np.asarray(capacity_tokens, dtype=np.int64),
            group_sequence_offsets=offsets_of(len(group.sequences) for group in groups),
            group_sequences=_concatenate(group.sequences for group in groups),
            group_rank_offsets=offsets_of(len(group.ranks) for group in groups),
            group_ranks=_concatenate(group.ranks for group in groups),
            group_weights=_concatenate(group.weights or (1,) * len(group.ranks) for group in groups),
            group_columns=np.array([group.columns for group in groups], dtype=np.int64),
            group_offload_ratio=np.array([group.offload_ratio for group in groups], dtype=np.float64),
            rank_micro_batch_offsets=offsets_of(len(rank) for rank in schedule),
            micro_batch_group_offsets=offsets_of(len(micro_batch) for micro_batch in micro_batches),
            micro_batch_groups=_concatenate(micro_batches),
            planner=planner,
            domain=domain,
        )


PREFETCH_STEPS = 2
"""Steps that a loader reads and plans ahead of the one that runs: enough for a batch that is slow to read or plan."""
Planner = Callable[[IntArray], Plan]
"""Makes a plan from the lengths ``[S]`` of a global batch."""


@runtime_checkable
class StepPlanner(Protocol):
    """A planner whose costs depend on the step. Steps are counted from 0."""

    def plan_step(self, lengths: IntArray, step: int) -> Plan:
        """Make the plan of a step. Raises ``LoaderFailure`` if its costs are not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One slice group as a Python object, for ``Plan.build``."""

    sequences: Sequence[int]
    ranks: Sequence[int]
    weights: Sequence[int] = ()
    columns: int = 1
    offload_ratio: float = 0.0


def offsets_of(counts: Iterable[int]) -> IntArray:
    """CSR offsets ``[n + 1]`` of ``n`` runs of the given lengths."""
    counts = counts if isinstance(counts, np.ndarray) else np.fromiter(counts, dtype=np.int64)
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def segment_sums(values: NDArray, offsets: IntArray) -> NDArray:
    """Sum of each CSR run. Empty runs sum to 0 (``np.add.reduceat`` would not do this)."""
    sums = np.zeros(len(values) + 1, dtype=values.dtype)
    np.cumsum(values, out=sums[1:])
    return sums[offsets[1:]] - sums[offsets[:-1]]


def concatenated_ranges(starts: IntArray, stops: IntArray) -> IntArray:
    """``[start_0 .. stop_0), [start_1 .. stop_1), ...`` as one array, without a Python loop."""
    counts = stops - starts
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)


def _concatenate(parts: Iterable[Sequence[int]]) -> IntArray:
    return np.fromiter((value for part in parts for value in part), dtype=np.int64)
