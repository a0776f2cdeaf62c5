"""Cuts documents into samples: the sequences that the model is trained on, none longer than the context.

A sample is a whole document or a part of one.

The label of a token is the next token of the same DOCUMENT. So where a document continues in a second sample, the last
token of the first sample predicts the first token of the second. The last token of a document (its EOS) predicts
nothing, and neither does the last token that is kept of a truncated document. In a corpus that is split, every token
is input exactly once, and every token except the first of each document is a target exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.plan.rank_plan import concatenated_ranges

OverLength = Literal["split", "truncate", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """A table of samples, ordered by the part of the corpus that they lie in. Shape letter: P samples."""

    document: IntArray  # [P] number of the document among the documents of all parts in the table
    start: IntArray  # [P] first token, counted from the first token of the first part in the table
    length: IntArray  # [P] tokens, 1 to context_length
    num_targets: IntArray  # [P] tokens that have a label: the first num_targets tokens of the sample
    num_trained: IntArray  # [P] how many of these labels have a weight other than 0
    weight_sums: NDArray[np.float64]  # [P] sum of the absolute weights of these labels

    @staticmethod
    def unweighted(*, document: IntArray, start: IntArray, length: IntArray, num_targets: IntArray) -> SampleTable:
        """Return the table of samples in which every label has weight 1."""
        return SampleTable(
            document=document,
            start=start,
            length=length,
            num_targets=num_targets,
            num_trained=num_targets,
            weight_sums=num_targets.astype(np.float64),
        )

    @property
    def num_samples(self) -> int:
        return len(self.length)

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())


class GrowingSamples:
    """A ``SampleTable`` that grows. Its arrays double when they are full, so a row is copied about twice on average."""

    def __init__(self) -> None:
        self.num_samples = 0
        kinds: dict[str, type] = {"weight_sums": np.float64}
        self._columns: dict[str, Any] = {
            spec.name: np.zeros(0, kinds.get(spec.name, np.int64)) for spec in fields(SampleTable)
        }

    def append(self, table: SampleTable) -> None:
        """Add the samples of ``table`` at the end."""
        stop = self.num_samples + table.num_samples
        for name, column in self._columns.items():
            if stop > len(column):
                column = np.zeros(max(stop, 2 * len(column)), dtype=column.dtype)
                column[: self.num_samples] = self._columns[name][: self.num_samples]
                self._columns[name] = column
            column[self.num_samples : stop] = getattr(table, name)
        self.num_samples = stop

    @property
    def table(self) -> SampleTable:
        """The table of all samples so far. Its arrays are views that a later ``append`` does not change."""
        return SampleTable(**{name: column[: self.num_samples] for name, column in self._columns.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCounts:
    """How many documents the over-length policy and the length filters changed or left out."""

    num_documents: int = 0
    """Documents with at least one token."""
    num_empty_documents: int = 0
    """Documents without a token, which are left out."""
    num_split: int = 0
    """Documents that were cut into several samples."""
    num_truncated: int = 0
    """Documents whose end was cut off."""
    num_dropped: int = 0
    """Documents that were left out because they are longer than the context."""
    num_filtered: int = 0
    """Documents that the length filters left out."""
    num_lost_tokens: int = 0
    """Tokens of truncated ends and of documents that were left out."""

    def __add__(self, other: SampleCounts) -> SampleCounts:
        """Return the sum of both counts, field by field."""
        return SampleCounts(
            **{spec.name: getattr(self, spec.name) + getattr(other, spec.name) for spec in fields(SampleCounts)}
        )


def make_samples(
    starts: IntArray,
    lengths: IntArray,
    context_length: int,
    over_length: OverLength,
    least: int = 1,
    most: int | None = None,
) -> tuple[SampleTable, SampleCounts]:
    """Apply the length filters, then the over-length policy. Returns the samples and the counts.

    Args:
        starts: ``[D]`` first token of each document, counted from the first token of the corpus.
        lengths: ``[D]`` tokens of each document, 0 or more.
        context_length: longest sample in tokens, at least 1.
        over_length: what happens to a document longer than the context. ``split`` cuts it into samples of
            ``context_length`` tokens and a rest, ``truncate`` keeps its first ``context_length`` tokens, and ``drop``
            leaves it out.
        least: documents of fewer tokens are left out, whatever the policy.
        most: documents of more tokens are left out, whatever the policy. None sets no limit.
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
        table = SampleTable.unweighted(document=document, start=starts, length=length, num_targets=length - 1)
    counts = SampleCounts(
        num_documents=len(too_long) - num_empty,
        num_empty_documents=num_empty,
        num_split=int(cut.sum()) if over_length == "split" else 0,
        num_truncated=int(cut.sum()) if over_length == "truncate" else 0,
        num_dropped=int(too_long.sum()) if over_length == "drop" else 0,
        num_filtered=int(filtered.sum()),
        num_lost_tokens=num_tokens - table.num_tokens,
    )
    return table, counts


def _split(document: IntArray, starts: IntArray, lengths: IntArray, context_length: int) -> SampleTable:
    num_samples = -(-lengths // context_length)
    place = concatenated_ranges(np.zeros_like(num_samples), num_samples)  # number of a sample inside its document
    offset = place * context_length
    length = np.minimum(np.repeat(lengths, num_samples) - offset, context_length)
    is_last = place == np.repeat(num_samples, num_samples) - 1
    return SampleTable.unweighted(
        document=np.repeat(document, num_samples),
        start=np.repeat(starts, num_samples) + offset,
        length=length,
        num_targets=length - is_last,
    )
