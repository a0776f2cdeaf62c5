"""One rank's part of a plan: the view that its runtime and its loader use.

A rank's micro-batch is an ordered list of *segments*, which are token ranges of sequences. The segments of the shared
group come first, if there is one: for each of its sequences the front segment and then the back segment of this member
(either may be empty). The local sequences follow, each as one segment. Tokens, labels, positions and activations are
laid out in exactly this order on the rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.plan.layout import member_bounds, member_tokens, segment_bounds
from bytescale.plan.plan import Plan, concatenated_ranges
from bytescale.plan.trees import Forest


@dataclass(frozen=True)
class SharedGroup:
    """A slice group of several ranks as one member sees it. Shape letters: K sequences, N members."""

    group: int  # number in the plan's total order; message tags derive from it
    ranks: tuple[int, ...]  # HDP ranks in member order
    member: int  # the place of this rank in ``ranks``
    sequences: IntArray  # [K] sequence numbers
    lengths: IntArray  # [K] tokens
    weights: IntArray  # [N] shares
    columns: int = 1  # of the members' grid, which is numbered row by row; 1: a ring

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def row(self) -> tuple[int, ...]:
        """The members of this member's row, which share queries, by column."""
        first = self.member - self.member % self.columns
        return tuple(range(first, first + self.columns))

    @property
    def column(self) -> tuple[int, ...]:
        """The members of this member's column, which share keys, by row."""
        return tuple(range(self.member % self.columns, self.size, self.columns))

    @cached_property
    def bounds(self) -> IntArray:
        """``[N, K, 2, 2]`` the two segments of each sequence that each member holds (``layout.segment_bounds``)."""
        return segment_bounds(self.lengths, self.weights)

    @cached_property
    def tokens_per_member(self) -> IntArray:
        """``[N]`` tokens that each member holds, all sequences together: the shapes of every ring message."""
        return member_tokens(self.lengths, self.weights).sum(axis=0)


@dataclass(frozen=True)
class MicroBatch:
    """The work of one rank in one forward and backward. P segments, in the order that the module's docstring gives."""

    index: int  # place in this rank's order
    shared: SharedGroup | None
    segment_sequences: IntArray  # [P] sequence number of each segment
    segment_starts: IntArray  # [P] first token, inside the sequence
    segment_stops: IntArray  # [P] one past the last token
    local_lengths: IntArray  # [number of local sequences] tokens of each, in layout order
    offload_ratios: tuple[tuple[int, float], ...]  # (tokens, r) of each group, in layout order
    trees: Forest | None = None  # of its sequences, shared ones first, where documents share prefixes (plan.trees)

    @staticmethod
    def of_documents(index: int, lengths: Sequence[int]) -> MicroBatch:
        """A micro-batch of whole sequences of these lengths, without a plan."""
        stops = np.array(lengths, dtype=np.int64)
        return MicroBatch(
            index=index,
            shared=None,
            segment_sequences=np.arange(len(stops)),
            segment_starts=np.zeros_like(stops),
            segment_stops=stops,
            local_lengths=stops,
            offload_ratios=(),
        )

    @property
    def offloaded_tokens(self) -> int:
        """Tokens whose rows move to host memory: the sum of floor(r_g n_g) over the groups."""
        return sum(math.floor(ratio * tokens + 1e-9) for tokens, ratio in self.offload_ratios)

    @property
    def num_tokens(self) -> int:
        return int((self.segment_stops - self.segment_starts).sum())

    @property
    def num_shared_tokens(self) -> int:
        return 0 if self.shared is None else int(self.shared.tokens_per_member[self.shared.member])

    @property
    def num_shared_sequences(self) -> int:
        return 0 if self.shared is None else len(self.shared.sequences)

    @property
    def sequences(self) -> IntArray:
        """``[S]`` its sequences, whole or in part: shared ones first."""
        local = self.segment_sequences[len(self.segment_sequences) - len(self.local_lengths) :]
        return local if self.shared is None else np.concatenate([self.shared.sequences, local])

    @property
    def documents(self) -> list[int]:
        """Those of its sequences, in the order of these; see ``trees``."""
        return (self.sequences if self.trees is None else self.trees.documents).tolist()

    def with_trees(self, forest: Forest) -> MicroBatch:
        """The micro-batch of a plan of the sequences of ``forest``, which knows the trees that it has."""
        return replace(self, trees=forest.of(self.sequences))

    @property
    def forest(self) -> Forest:
        """The trees of its sequences; without any, each is a document that shares nothing."""
        if self.trees is not None:
            return self.trees
        shared = [] if self.shared is None else [self.shared.lengths]
        return Forest.without_trees(self.sequences, np.concatenate([*shared, self.local_lengths]))

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """``(sequence, start, stop)`` of the runs of tokens that the rows are, in order."""
        bounds = (self.segment_sequences, self.segment_starts, self.segment_stops)
        return list(zip(*(array.tolist() for array in bounds), strict=True))

    def apart(self) -> tuple[MicroBatch, MicroBatch]:
        """The sequences that the group shares, and the others, as micro-batches of their own."""
        count, trees = self.num_shared_sequences, self.trees

        def part(segments: slice, sequences: IntArray, **changes: Any) -> MicroBatch:
            arrays = {
                name: getattr(self, name)[segments] for name in ("segment_sequences", "segment_starts", "segment_stops")
            }
            return replace(self, **arrays, trees=None if trees is None else trees.of(sequences), **changes)

        numbers = np.arange(len(self.sequences))
        return (
            part(slice(2 * count), numbers[:count], local_lengths=self.local_lengths[:0]),
            part(slice(2 * count, None), numbers[count:], shared=None),
        )

    def position_ids(self) -> IntArray:
        """``[num_tokens]`` place of each token inside its sequence, or inside its documents where they share rows."""
        if self.trees is None:
            return concatenated_ranges(self.segment_starts, self.segment_stops)
        per_sequence = np.split(self.trees.positions(), np.cumsum(self.trees.sequence_lengths)[:-1])
        parts = [per_sequence[place][start:stop] for place, start, stop in self._runs_of_trees(self.trees)]
        return np.concatenate(parts or [np.zeros(0, int)])

    def document_runs(self, trees: Forest) -> list[tuple[int, int, IntArray]]:
        """``(document, first token, rows)`` of the runs of tokens of each document that the rank has.

        ``document`` is a place in ``trees.documents``, of this micro-batch's ``trees``.
        """
        found, first = [], 0
        for place, start, stop in self._runs_of_trees(trees):
            for document in range(int(trees.offsets[place]), int(trees.offsets[place + 1])):
                path = trees.paths[document]
                low, high = np.searchsorted(path, [start, stop]).tolist()
                if high > low:
                    found.append((document, low, path[low:high] - start + first))
            first += stop - start
        return found

    @property
    def rows_of_documents(self) -> list[tuple[int, int, IntArray]]:
        """``(document, first token, rows)`` of the runs of tokens that the rank has, with and without ``trees``.

        ``document`` is a number of the batch.
        """
        if self.trees is not None:
            return [(int(self.trees.documents[at]), start, own) for at, start, own in self.document_runs(self.trees)]
        ends = np.cumsum(self.segment_stops - self.segment_starts).tolist()
        runs = zip(self.runs, ends, strict=True)
        return [
            (number, start, np.arange(start, stop) + end - stop) for (number, start, stop), end in runs if stop > start
        ]

    def _runs_of_trees(self, trees: Forest) -> list[tuple[int, int, int]]:
        """``runs`` with the place of the sequence in ``trees``."""
        first = self.num_shared_sequences
        places = [*np.repeat(np.arange(first), 2).tolist(), *range(first, len(trees.offsets) - 1)]
        return [(place, start, stop) for place, (_, start, stop) in zip(places, self.runs, strict=True)]


@dataclass(frozen=True)
class RankPlan:
    """Everything that one rank has to know about a step."""

    rank: int
    num_ranks: int
    micro_batches: tuple[MicroBatch, ...]
    domain: int  # consecutive ranks that run in lockstep with it, this rank among them
    num_rounds: int  # in which it takes part; in those after its last micro-batch without work
    digest: int  # fingerprint of the whole plan
    num_tokens: int  # of all ranks

    @staticmethod
    def of(plan: Plan, rank: int, *, digest: int | None = None) -> RankPlan:
        """Rank ``rank``'s part of ``plan``. ``digest`` is the plan's fingerprint; None: it is computed here."""
        micro_batches = tuple(
            _micro_batch_view(plan, rank, number, index) for index, number in enumerate(plan.micro_batches_of(rank))
        )
        digest = plan.digest() if digest is None else digest
        return RankPlan(
            rank=rank,
            num_ranks=plan.num_ranks,
            micro_batches=micro_batches,
            domain=plan.domain,
            num_rounds=int(plan.rank_rounds[rank]),
            digest=digest,
            num_tokens=plan.num_tokens,
        )


def _micro_batch_view(plan: Plan, rank: int, number: int, index: int) -> MicroBatch:
    shared: SharedGroup | None = None
    segments: list[tuple[IntArray, IntArray, IntArray]] = []  # sequences, starts and stops
    local_lengths: list[IntArray] = []
    offload_ratios: list[tuple[int, float]] = []
    for group in plan.groups_of(number).tolist():
        members = plan.ranks_of(group)
        group_sequences = plan.sequences_of(group)
        lengths = plan.lengths[group_sequences]
        if len(members) > 1:
            member = int(np.flatnonzero(members == rank)[0])
            shared = SharedGroup(
                group=group,
                ranks=tuple(members.tolist()),
                member=member,
                sequences=group_sequences,
                lengths=lengths,
                weights=plan.weights_of(group),
                columns=int(plan.group_columns[group]),
            )
            bounds = member_bounds(shared.lengths, shared.weights, member)
            segments.append((np.repeat(group_sequences, 2), bounds[:, :, 0].ravel(), bounds[:, :, 1].ravel()))
        else:
            segments.append((group_sequences, np.zeros_like(lengths), lengths))
            local_lengths.append(lengths)
        tokens = int((segments[-1][2] - segments[-1][1]).sum())
        offload_ratios.append((tokens, float(plan.group_offload_ratio[group])))
    empty = np.zeros(0, dtype=np.int64)
    sequences, starts, stops = (np.concatenate(parts) for parts in zip(*(segments or [(empty,) * 3]), strict=True))
    return MicroBatch(
        index=index,
        shared=shared,
        segment_sequences=sequences,
        segment_starts=starts,
        segment_stops=stops,
        local_lengths=np.concatenate(local_lengths or [empty]),
        offload_ratios=tuple(offload_ratios),
    )
