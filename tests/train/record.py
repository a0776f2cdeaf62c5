"""Counts the tokens that a run was given, one by one: slow and obvious."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from bytescale.data.loading.corpus import Corpus
from bytescale.data.loading.record import read_record
from bytescale.data.order.epoch import epoch_order


def times_given(folder: Path, corpus: Corpus, steps: int) -> Counter[tuple[int, int]]:
    """How often each (document, token of the document) was given to a rank."""
    first: dict[int, int] = {}  # token of the corpus that each document starts with
    for document, start in zip(corpus.samples.document.tolist(), corpus.samples.start.tolist(), strict=True):
        first.setdefault(document, start)
    counts: Counter[tuple[int, int]] = Counter()
    for segments, _ in read_record(folder, steps):
        for sample, start, stop, _ in segments.tolist():
            row = int(corpus.index.rows(np.array([sample]))[0])
            document = int(corpus.samples.document[row])
            base = int(corpus.samples.start[row]) - first[document]
            counts.update((document, base + token) for token in range(start, stop))
    return counts


def times_expected(corpus: Corpus, seed: int, steps: int, batch_tokens: int) -> Counter[tuple[int, int]]:
    """The same by the seed alone, sample by sample and token by token."""
    first: dict[int, int] = {}
    for document, start in zip(corpus.samples.document.tolist(), corpus.samples.start.tolist(), strict=True):
        first.setdefault(document, start)
    counts: Counter[tuple[int, int]] = Counter()
    stream = (int(sample) for epoch in range(1000) for sample in epoch_order(corpus.samples.num_samples, seed, epoch))
    sample = next(stream)
    for _ in range(steps):
        budget = batch_tokens
        while (length := int(corpus.samples.length[sample])) <= budget:
            document = int(corpus.samples.document[sample])
            base = int(corpus.samples.start[sample]) - first[document]
            counts.update((document, base + token) for token in range(length))
            budget -= length
            sample = next(stream)
    return counts
