"""Counts the tokens that a run was given, one by one: slow and obvious."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bytescale.data.loading.corpus import Corpus
from bytescale.data.loading.record import read_record
from bytescale.data.order.epoch import epoch_order


def times_given(folder: Path, corpus: Corpus, steps: int) -> Counter[tuple[int, int]]:
    """How often each (part of the corpus, token of the part) was given to a rank."""
    samples = corpus.samples
    start_of = dict(zip(samples.name.tolist(), samples.start.tolist(), strict=True))
    counts: Counter[tuple[int, int]] = Counter()
    for segments, _ in read_record(folder, steps):
        for sample, start, stop, _ in segments.tolist():
            counts.update((sample >> 32, start_of[sample] + token) for token in range(start, stop))
    return counts


def times_expected(corpus: Corpus, seed: int, steps: int, batch_tokens: int) -> Counter[tuple[int, int]]:
    """The same by the seed alone, sample by sample and token by token."""
    samples = corpus.samples
    counts: Counter[tuple[int, int]] = Counter()
    stream = (int(sample) for epoch in range(1000) for sample in epoch_order(len(samples), seed, epoch))
    sample = next(stream)
    for _ in range(steps):
        budget = batch_tokens
        while (length := int(samples.length[sample])) <= budget:
            part, start = int(samples.part[sample]), int(samples.start[sample])
            counts.update((part, start + token) for token in range(length))
            budget -= length
            sample = next(stream)
    return counts
