"""Cuts documents into samples: the sequences that the model is trained on, none longer than the context.

The label of a token is the next token of the same DOCUMENT. So where a document continues in a second sample, the last
token of the first sample predicts the first token of the second. The last token of a document (its EOS) predicts
nothing, and neither does the last token that is kept of a truncated document. In a corpus that is split, every token
is input exactly once, and every token except the first of each document is a target exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.errors import DataError
from bytescale.config.schema import DataConfig
from bytescale.plan.plan import concatenated_ranges

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

    @staticmethod
    def unweighted(part: int, document: IntArray, start: IntArray, length: IntArray, num_targets: IntArray) -> Samples:
        """Return all samples of a part in which every label has weight 1."""
        return Samples(
            name=(part << PART_SHIFT) + np.arange(len(length)),
            document=document,
            start=start,
            length=length,
            num_targets=num_targets,
            num_trained=num_targets,
            weight_sums=num_targets.astype(np.float64),
        )

    @staticmethod
    def joined(tables: Sequence[Samples]) -> Samples:
        """Return the samples of ``tables``, one table behind the other."""
        tables = [NO_SAMPLES, *tables] if len(tables) != 1 else tables
        names = [spec.name for spec in fields(Samples)]
        return Samples(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in names})

    def __getitem__(self, rows: IntArray | slice) -> Samples:
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


NO_SAMPLES = Samples.unweighted(0, *(np.zeros(0, dtype=np.int64) for _ in range(4)))


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


def trained_of(samples: Samples, weights: NDArray, place: str) -> tuple[IntArray, NDArray[np.float64]]:
    """``num_trained`` and ``weight_sums`` of the samples of a part that has these ``weights [T]``.

    Each sum depends on its own weights alone, to the last bit. Raises ``DataError`` if a weight is not finite in fp32.
    """
    values = np.asarray(weights).astype(np.float32)
    if not np.isfinite(values).all():
        token = int(np.flatnonzero(~np.isfinite(values))[0])
        raise DataError(
            f"{place}: the weight of token {token} is {values[token]}",
            so="the loss would not be a number",
            fix="write finite weights",
        )
    first = samples.start + 1  # the label of a token is the next one
    counts, sums = np.zeros(len(samples), np.int64), np.zeros(len(samples))
    for row, (start, count) in enumerate(zip(first.tolist(), samples.num_targets.tolist(), strict=True)):
        own = np.abs(values[start : start + count]).astype(np.float64)
        counts[row], sums[row] = np.count_nonzero(own), own.sum()
    return counts, sums


def make_samples(part: int, offsets: IntArray, config: DataConfig) -> tuple[Samples, SampleCounts]:
    """Apply the length filters, then the over-length policy, to a part. Returns its samples and the counts.

    Args:
        part: its number.
        offsets: ``[D + 1]`` first token of each of its documents, then the number of its tokens.
        config: whose ``over_length`` makes several samples of a longer document than ``context_length`` (``split``),
            keeps its first tokens (``truncate``) or nothing (``drop``).
    """
    context_length, over_length = config.context_length, config.over_length
    least, most = config.min_document_tokens, config.max_document_tokens
    starts, lengths = offsets[:-1], np.diff(offsets)
    num_empty = int((lengths == 0).sum())
    filtered = (lengths > 0) & ((lengths < least) | (lengths > (np.inf if most is None else most)))
    too_long = (lengths > context_length) & ~filtered
    kept = (lengths > 0) & ~filtered & ~(too_long if over_length == "drop" else np.zeros_like(too_long))
    document = np.flatnonzero(kept)
    starts, lengths, cut = starts[kept], lengths[kept], too_long[kept]
    if over_length == "split":
        samples = _split(part, document, starts, lengths, context_length)
    else:
        length = np.minimum(lengths, context_length)
        samples = Samples.unweighted(part, document, starts, length, length - 1)
    counts = SampleCounts(
        num_documents=len(too_long) - num_empty,
        num_empty_documents=num_empty,
        num_split=int(cut.sum()) if over_length == "split" else 0,
        num_truncated=int(cut.sum()) if over_length == "truncate" else 0,
        num_dropped=int(too_long.sum()) if over_length == "drop" else 0,
        num_filtered=int(filtered.sum()),
        num_lost_tokens=int(offsets[-1]) - samples.num_tokens,
        num_samples=len(samples),
        num_tokens=samples.num_tokens,
    )
    return samples, counts


def _split(part: int, document: IntArray, starts: IntArray, lengths: IntArray, context_length: int) -> Samples:
    num_samples = -(-lengths // context_length)
    place = concatenated_ranges(np.zeros_like(num_samples), num_samples)  # number of a sample inside its document
    offset = place * context_length
    length = np.minimum(np.repeat(lengths, num_samples) - offset, context_length)
    is_last = place == np.repeat(num_samples, num_samples) - 1
    start = np.repeat(starts, num_samples) + offset
    return Samples.unweighted(part, np.repeat(document, num_samples), start, length, length - is_last)
