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
    for document, start in zip(corpus.pieces.document.tolist(), corpus.pieces.start.tolist(), strict=True):
        first.setdefault(document, start)
    counts: Counter[tuple[int, int]] = Counter()
    for segments, _ in read_record(folder, steps):
        for piece, start, stop, _ in segments.tolist():
            row = int(corpus.index.rows(np.array([piece]))[0])
            document = int(corpus.pieces.document[row])
            base = int(corpus.pieces.start[row]) - first[document]
            counts.update((document, base + token) for token in range(start, stop))
    return counts


def times_expected(corpus: Corpus, seed: int, steps: int, batch_tokens: int) -> Counter[tuple[int, int]]:
    """The same by the seed alone, piece by piece and token by token."""
    first: dict[int, int] = {}
    for document, start in zip(corpus.pieces.document.tolist(), corpus.pieces.start.tolist(), strict=True):
        first.setdefault(document, start)
    counts: Counter[tuple[int, int]] = Counter()
    stream = (int(piece) for epoch in range(1000) for piece in epoch_order(corpus.pieces.num_pieces, seed, epoch))
    piece = next(stream)
    for _ in range(steps):
        budget = batch_tokens
        while (length := int(corpus.pieces.length[piece])) <= budget:
            document = int(corpus.pieces.document[piece])
            base = int(corpus.pieces.start[piece]) - first[document]
            counts.update((document, base + token) for token in range(length))
            budget -= length
            piece = next(stream)
    return counts
