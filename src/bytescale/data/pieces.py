"""From documents to pieces: the sequences that are trained on, none longer than the context.

The label of a token is the next token of the same DOCUMENT. So the last token of a piece that a later piece continues
predicts the first token of that one; the last token of a document (its EOS) and of a truncated document predict
nothing. Every token of a split corpus is input exactly once, and every token but the first of each document is a
target exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bytescale.plan.rank_plan import concatenated_ranges

IntArray = NDArray[np.int64]

OverLength = Literal["split", "truncate", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTable:
    """Some pieces, part by part. Shape letter: P pieces."""

    document: IntArray  # [P] number of the document among those of all parts here
    start: IntArray  # [P] first token, counted from the first token of the first part
    length: IntArray  # [P] tokens, 1 to context_length
    num_targets: IntArray  # [P] tokens that have a label: the first num_targets of the piece

    @property
    def num_pieces(self) -> int:
        return len(self.length)

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())


class GrowingPieces:
    """A ``PieceTable`` to which pieces are added; each is copied twice at most, on average."""

    def __init__(self) -> None:
        self.num_pieces = 0
        self._columns = np.zeros((len(fields(PieceTable)), 0), dtype=np.int64)

    def append(self, table: PieceTable) -> None:
        """Add the pieces of ``table`` at the end."""
        stop = self.num_pieces + table.num_pieces
        if stop > self._columns.shape[1]:
            columns = np.zeros((len(self._columns), max(stop, 2 * self._columns.shape[1])), dtype=np.int64)
            columns[:, : self.num_pieces] = self._columns[:, : self.num_pieces]
            self._columns = columns
        for column, spec in zip(self._columns, fields(PieceTable), strict=True):
            column[self.num_pieces : stop] = getattr(table, spec.name)
        self.num_pieces = stop

    @property
    def table(self) -> PieceTable:
        """All pieces so far: views, which further pieces do not change."""
        columns = zip(fields(PieceTable), self._columns, strict=True)
        return PieceTable(**{spec.name: column[: self.num_pieces] for spec, column in columns})


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCounts:
    """What the over-length policy did."""

    num_documents: int = 0
    """Documents with at least one token."""
    num_empty_documents: int = 0
    """Documents without a token, left out."""
    num_split: int = 0
    """Documents cut into several pieces."""
    num_truncated: int = 0
    """Documents whose end was cut off."""
    num_dropped: int = 0
    """Documents left out because they are longer than the context."""
    num_filtered: int = 0
    """Documents left out by the length filters."""
    num_lost_tokens: int = 0
    """Tokens of truncated ends and of documents that were left out."""

    def __add__(self, other: PieceCounts) -> PieceCounts:
        """Of both together."""
        return PieceCounts(
            **{spec.name: getattr(self, spec.name) + getattr(other, spec.name) for spec in fields(PieceCounts)}
        )


def make_pieces(
    starts: IntArray,
    lengths: IntArray,
    context_length: int,
    over_length: OverLength,
    least: int = 1,
    most: int | None = None,
) -> tuple[PieceTable, PieceCounts]:
    """Apply the over-length policy.

    Args:
        starts: ``[D]`` first token of each document, counted from the first token of the corpus.
        lengths: ``[D]`` tokens of each document, 0 or more.
        context_length: longest piece in tokens, at least 1.
        over_length: ``split`` into pieces of ``context_length`` and a rest, ``truncate`` to the first
            ``context_length`` tokens, or ``drop`` the document.
        least: shorter documents are left out, whatever the policy.
        most: longer documents are left out, whatever the policy; None: none is.
    """
    num_empty, num_tokens = int((lengths == 0).sum()), int(lengths.sum())
    filtered = (lengths > 0) & ((lengths < least) | (lengths > (np.inf if most is None else most)))
    too_long = (lengths > context_length) & ~filtered
    kept = (lengths > 0) & ~filtered & ~(too_long if over_length == "drop" else np.zeros_like(too_long))
    document = np.flatnonzero(kept)
    starts, lengths, cut = starts[kept], lengths[kept], too_long[kept]
    if over_length == "split":
        table = _split(document, starts, lengths, context_length)
    else:
        length = np.minimum(lengths, context_length)
        table = PieceTable(document=document, start=starts, length=length, num_targets=length - 1)
    counts = PieceCounts(
        num_documents=len(too_long) - num_empty,
        num_empty_documents=num_empty,
        num_split=int(cut.sum()) if over_length == "split" else 0,
        num_truncated=int(cut.sum()) if over_length == "truncate" else 0,
        num_dropped=int(too_long.sum()) if over_length == "drop" else 0,
        num_filtered=int(filtered.sum()),
        num_lost_tokens=num_tokens - table.num_tokens,
    )
    return table, counts


def _split(document: IntArray, starts: IntArray, lengths: IntArray, context_length: int) -> PieceTable:
    num_pieces = -(-lengths // context_length)
    place = concatenated_ranges(np.zeros_like(num_pieces), num_pieces)  # of a piece inside its document
    offset = place * context_length
    length = np.minimum(np.repeat(lengths, num_pieces) - offset, context_length)
    is_last = place == np.repeat(num_pieces, num_pieces) - 1
    return PieceTable(
        document=np.repeat(document, num_pieces),
        start=np.repeat(starts, num_pieces) + offset,
        length=length,
        num_targets=length - is_last,
    )
