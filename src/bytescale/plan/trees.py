"""Trees of documents: prefixes that documents share are rows that exist once.

Documents in depth-first order are **one sequence of their unique rows**. Each document adds the rows behind the prefix
that it shares with the document before it::

    a b c d e     5 rows       document 0
    a b c x       1 row  x     shares 3
    a b y z       2 rows y z   shares 2
                               the sequence: a b c d e x y z, at positions 0 1 2 3 4 3 2 3

A row of one document sees the rows of its **path**: the row at each position up to its own. The document's own rows are
a causal triangle. Where documents branch off, the rows of the path between two branches are a **node**: all rows behind
the triangle that holds the node, up to the end of its subtree, see all of it. That is a rectangle of queries and keys.
Nodes of one depth have neither a query nor a key in common.

Shape letters: D documents, S sequences, B nodes of one depth, T rows of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.common.errors import PlanError
from bytescale.plan.plan import concatenated_ranges, offsets_of, segment_sums


class Nodes(NamedTuple):
    """The nodes of one depth. Rows are counted from the start of their sequence."""

    sequence: IntArray  # [B]
    queries: IntArray  # [B, 2] rows ``[start, stop)`` that see all keys; may be empty
    keys: IntArray  # [B, 2] rows of the node


@dataclass(frozen=True, eq=False)
class Forest:
    """Documents as sequences of their unique rows. A sequence of one document has it as it is."""

    documents: IntArray  # [D] their numbers in the batch, sequence by sequence, each sequence in depth-first order
    lengths: IntArray  # [D] tokens of each
    shared: IntArray  # [D] how many of its first rows are those of the document before; 0 for a sequence's first
    offsets: IntArray  # [S + 1] of the sequences

    @staticmethod
    def without_trees(documents: IntArray, lengths: IntArray) -> Forest:
        """Every document is a sequence."""
        return Forest(documents, lengths, np.zeros_like(lengths), np.arange(len(lengths) + 1))

    @cached_property
    def sequence_lengths(self) -> IntArray:
        """``[S]`` rows of each sequence."""
        return segment_sums(self.lengths - self.shared, self.offsets)

    @cached_property
    def sequence_of(self) -> IntArray:
        """``[D]`` the sequence of each document."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @cached_property
    def triangles(self) -> IntArray:
        """``[D, 2]`` the rows that each document adds, counted from the start of its sequence."""
        stops = np.cumsum(self.lengths - self.shared)
        first = np.repeat(offsets_of(self.sequence_lengths)[:-1], np.diff(self.offsets))
        return np.stack([stops - (self.lengths - self.shared), stops], axis=1) - first[:, None]

    def positions(self) -> IntArray:
        """``[T]`` the place of each row in its documents."""
        return concatenated_ranges(self.shared, self.lengths)

    @cached_property
    def paths(self) -> list[IntArray]:
        """``[D]`` arrays ``[length]``: the rows of each document, counted from the start of its sequence."""
        paths: list[IntArray] = []
        for shared, (start, stop) in zip(self.shared.tolist(), self.triangles.tolist(), strict=True):
            own = np.arange(start, stop)
            paths.append(np.concatenate([paths[-1][:shared], own]) if shared else own)
        return paths

    def runs(self) -> tuple[IntArray, IntArray]:
        """Cut the rows of all sequences where paths fork: every row of a run but its first follows the one before it.

        Returns ``[N]`` the first row of each run, and ``[N]`` the run at whose end it begins: an earlier one; -1: none.
        """
        first = offsets_of(self.sequence_lengths)[:-1][self.sequence_of]
        before, starts = np.full(len(first), -1), self.triangles[:, 0] + first
        for document in np.flatnonzero(self.shared).tolist():
            before[document] = self.paths[document][self.shared[document] - 1] + first[document]
        branches = self.lengths > self.shared  # all other documents are prefixes of those before them
        before, starts = before[branches], starts[branches]
        edges = np.unique(np.concatenate([starts, before[before >= 0] + 1]))
        ends = np.searchsorted(edges, starts)
        parents = np.arange(len(edges)) - 1
        parents[ends] = np.searchsorted(edges, before, side="right") - 1
        return edges, parents

    def of(self, sequences: IntArray) -> Forest:
        """The forest of some sequences, in their order."""
        places = concatenated_ranges(self.offsets[sequences], self.offsets[sequences + 1])
        counts = np.diff(self.offsets)[sequences]
        return Forest(self.documents[places], self.lengths[places], self.shared[places], offsets_of(counts))

    @cached_property
    def nodes(self) -> list[Nodes]:
        """The nodes, by depth."""
        found: list[Nodes] = []
        low, high = self.offsets[:-1], self.offsets[1:]
        above = np.zeros_like(low)
        while (several := high - low > 1).any():
            low, high, above = low[several], high[several], above[several]
            position, starts, stops, subtree = branches_of(self.shared, low, high)
            start, stop = self.triangles[low].T
            zero = start - self.shared[low]  # where position 0 would be, counted back along the triangle
            seeing = np.stack([stop, self.triangles[high - 1, 1]], axis=1)
            seen = np.stack([above, position], axis=1) + zero[:, None]
            found.append(Nodes(self.sequence_of[low], seeing, seen))
            low, high, above = starts, stops, position[subtree]
        return found

    def verify(self, lengths: IntArray) -> None:
        """Raise ``PlanError`` unless every token of the documents of these ``lengths [D]`` has one row.

        A row stands for one token of each document whose path it is on; a token of a prefix that several sequences
        have is computed once in each of them. A document's own rows are at positions ``shared`` to its length, and the
        first ``shared`` rows of the path before it are at positions 0 to ``shared``, if that path is long enough.
        """
        if len(self.documents) != len(lengths) or (np.bincount(self.documents, minlength=len(lengths)) != 1).any():
            raise PlanError(
                "the sequences of a plan with shared prefixes do not have every document once",
                so="documents would be left out, or counted twice",
            )
        before = np.concatenate([[0], self.lengths[:-1]])
        before[self.offsets[:-1]] = 0
        wrong = (self.lengths != lengths[self.documents]) | (self.shared < 0)
        wrong |= self.shared > np.minimum(before, self.lengths)
        if wrong.any():
            document = int(self.documents[wrong.argmax()])
            raise PlanError(
                f"the rows of document {document} are not its {lengths[document]} tokens in order",
                so="its tokens would see others than those before them",
            )


def branches_of(shared: IntArray, low: IntArray, high: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut subtrees of documents ``low .. high - 1``, at least two each, ``[B]`` in order, at their first branches.

    Returns ``[B]`` positions of the branches in their documents; and of the parts ``[P]`` the first document, one past
    the last, and the subtree that each is of.
    """
    inside, counts = concatenated_ranges(low + 1, high), high - low - 1
    position = np.minimum.reduceat(shared[inside], offsets_of(counts)[:-1])
    starts = np.sort(np.concatenate([low, inside[shared[inside] == np.repeat(position, counts)]]))
    subtree = np.searchsorted(low, starts, side="right") - 1
    return position, starts, np.minimum(np.append(starts[1:], high[-1]), high[subtree]), subtree
