"""Cuts documents into samples: the sequences that the model is trained on, none longer than the context.

The label of a token is the next token of the same DOCUMENT. So where a document continues in a second sample, the last
token of the first sample predicts the first token of the second. The last token of a document (its EOS) predicts
nothing, and neither does the last token that is kept of a truncated document. In a corpus that is split, every token
is input exactly once, and every token except the first of each document is a target exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray, Rows, blocks, numbers_of
from bytescale.common.errors import DataError
from bytescale.config.schema import DataConfig
from bytescale.data.tokens.indexed import TokenIndex

PART_SHIFT = 32
"""The name of a sample is ``(number of its part << PART_SHIFT) + number of the sample in that part``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples in some order. Shape letter: P samples."""

    name: IntArray  # [P] see ``PART_SHIFT``
    document: IntArray  # [P] number of the document in its part
    start: IntArray  # [P] first token, counted from the first token of the part
    length: IntArray  # [P] tokens, 1 to context_length
    num_targets: IntArray  # [P] tokens that have a label: the first num_targets tokens of the sample
    num_trained: IntArray  # [P] how many of these labels have a weight other than 0
    weight_sums: NDArray[np.float64]  # [P] sum of the absolute weights of these labels

    def __getitem__(self, rows: Rows) -> Samples:
        return Samples(**{spec.name: getattr(self, spec.name)[rows] for spec in fields(Samples)})

    def __len__(self) -> int:
        return len(self.length)

    @property
    def part(self) -> IntArray:
        """``[P]`` number of the part of the corpus that each lies in."""
        return self.name >> PART_SHIFT

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())


_DTYPES = {"weight_sums": np.float64}
Trained = tuple[NDArray[np.int32], NDArray[np.float64] | None]
"""``num_trained [P]`` and ``weight_sums [P]`` of the samples of a part; None: the sums are the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSamples:
    """All samples of a part: a ``SampleTable``. Shape letters: P samples, D documents."""

    part: int
    index: TokenIndex
    config: DataConfig
    document: NDArray[np.uint32] | None  # [P] number of each sample's document; None: every document is one sample
    trained: Trained | None = None  # None: every label has weight 1

    def __len__(self) -> int:
        return self.index.num_documents if self.document is None else len(self.document)

    def __getitem__(self, rows: Rows) -> Samples:
        rows = numbers_of(rows, len(self))
        document = rows if self.document is None else self.document[rows].astype(np.int64)
        start = self.index.pointers[document] // self.index.dtype.itemsize
        stop = start + self.index.document_lengths[document]
        most, is_split = self.config.context_length, self.config.over_length == "split"
        if is_split and self.document is not None:
            long = np.flatnonzero(stop - start > most)
            start[long] += most * (rows[long] - self.document.searchsorted(self.document[rows[long]]))
        length = np.minimum(stop - start, most)
        num_targets = length - ((start + length == stop) if is_split else 1)
        counts, sums = self.trained or (None, None)
        num_trained = num_targets if counts is None else counts[rows].astype(np.int64)
        return Samples(
            name=(self.part << PART_SHIFT) + rows,
            document=document,
            start=start,
            length=length,
            num_targets=num_targets,
            num_trained=num_trained,
            weight_sums=num_trained.astype(np.float64) if sums is None else sums[rows],
        )


class SampleTable:
    """Samples of several tables, one behind the other. They are made when they are asked for, from few bytes each."""

    def __init__(self, tables: Sequence[PartSamples | SampleTable | Samples], rows: NDArray | None = None) -> None:
        """``rows``: those that are wanted, in their order; None: all."""
        self.tables, self._rows = tables, rows
        self.starts = np.cumsum([0, *map(len, tables)])  # the first row of each table, then the number of all rows

    def __len__(self) -> int:
        return int(self.starts[-1]) if self._rows is None else len(self._rows)

    def __getitem__(self, rows: Rows) -> Samples:
        rows = numbers_of(rows if self._rows is None else self._rows[rows], len(self))
        if len(self.tables) == 1:
            return self.tables[0][rows]
        columns: dict[str, Any] = {
            spec.name: np.empty(len(rows), _DTYPES.get(spec.name, np.int64)) for spec in fields(Samples)
        }
        table = np.searchsorted(self.starts, rows, side="right") - 1
        # Numbers of 16 bits are sorted several times as fast.
        by_table = np.argsort(table.astype(np.uint16) if len(self.tables) < 2**16 else table, kind="stable")
        numbers, firsts = np.unique(table[by_table], return_index=True)
        for number, own in zip(numbers.tolist(), np.split(by_table, firsts[1:]), strict=False):  # no row: no table
            found = self.tables[number][rows[own] - self.starts[number]]
            for name, values in columns.items():
                values[own] = getattr(found, name)
        return Samples(**columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCounts:
    """How many documents the over-length policy changed or left out."""

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
    num_lost_tokens: int = 0
    """Tokens of truncated ends and of documents that were left out."""
    num_untrained: int = 0
    """Samples without a token that is trained on, such as the first part of a conversation that begins with a long
    question. They are read, and change nothing."""
    num_samples: int = 0
    num_tokens: int = 0
    """Tokens of all samples, which is what an epoch trains on."""

    def __add__(self, other: SampleCounts) -> SampleCounts:
        return SampleCounts(
            **{spec.name: getattr(self, spec.name) + getattr(other, spec.name) for spec in fields(SampleCounts)}
        )


def trained_of(samples: PartSamples, weights: NDArray, place: str) -> Trained:
    """What of the samples of a part is trained on under these ``weights [T]``.

    Each sum depends on its own weights alone, to the last bit. Raises ``DataError`` if a weight is not finite in fp32.
    """
    for own in blocks(len(weights)):
        finite = np.isfinite(weights[own].astype(np.float32, copy=False))
        if not finite.all():
            token = own.start + int(finite.argmin())
            raise DataError(
                f"{place}: the weight of token {token} is {weights[token]}",
                so="the loss would not be a number",
                fix="write finite weights",
            )
    counts, sums = np.zeros(len(samples), np.int32), np.zeros(len(samples))
    for own in blocks(len(samples)):
        found = samples[own]
        starts = (found.start + 1).tolist()  # the label of a token is the next one
        for row, start, count in zip(range(len(samples))[own], starts, found.num_targets.tolist(), strict=True):
            values = np.abs(weights[start : start + count].astype(np.float32)).astype(np.float64)
            counts[row], sums[row] = np.count_nonzero(values), values.sum()
    return counts, None if np.array_equal(counts, sums) else sums


def make_samples(part: int, index: TokenIndex, config: DataConfig) -> tuple[PartSamples, SampleCounts]:
    """Apply the over-length policy to a part. Returns its samples and the counts.

    Args:
        part: its number.
        index: of its documents.
        config: whose ``over_length`` makes several samples of a longer document than ``context_length`` (``split``),
            keeps its first tokens (``truncate``) or nothing (``drop``).
    """
    context_length, over_length = config.context_length, config.over_length
    counts, is_plain, documents = SampleCounts(), True, [np.zeros(0, dtype=np.uint32)]
    for own in blocks(index.num_documents):
        lengths = index.document_lengths[own].astype(np.int64)
        is_empty = lengths == 0
        too_long = lengths > context_length
        kept = ~is_empty & ~(too_long if over_length == "drop" else np.zeros_like(too_long))
        number = np.where(kept, -(-lengths // context_length) if over_length == "split" else 1, 0)  # [D] samples
        documents.append(np.repeat(np.arange(own.start, own.stop, dtype=np.uint32), number))
        num_tokens = int((lengths if over_length == "split" else np.minimum(lengths, context_length))[kept].sum())
        counts += SampleCounts(
            num_documents=len(lengths) - int(is_empty.sum()),
            num_empty_documents=int(is_empty.sum()),
            num_split=int(too_long.sum()) if over_length == "split" else 0,
            num_truncated=int(too_long.sum()) if over_length == "truncate" else 0,
            num_dropped=int(too_long.sum()) if over_length == "drop" else 0,
            num_lost_tokens=int(lengths.sum()) - num_tokens,
            num_samples=int(number.sum()),
            num_tokens=num_tokens,
        )
        is_plain = is_plain and bool((number == 1).all())
    document = None if is_plain else np.concatenate(documents)
    return PartSamples(part=part, index=index, config=config, document=document), counts
