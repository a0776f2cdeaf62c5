"""The batch of ``plan`` and ``simulate``: from a file, a length distribution of the paper, or a config's corpus."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.common.errors import ConfigError, DataError
from bytescale.common.limits import limits
from bytescale.common.parsing import parse_json
from bytescale.common.units import MOST_COUNT
from bytescale.config import DataConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """The sequences: from `lengths` if set, else from `data.sources` if set, else from `distribution`."""

    lengths: Path | None = None
    """A file of sequence lengths: .npy, .json (a list), or text with numbers."""
    distribution: Literal["github", "byted"] = "github"
    """A length distribution of the paper. data.batch_tokens are drawn from it, and documents that are longer than
    data.context_length are split."""
    seed: int = field(default=0, metadata=limits(least=0))
    """Random seed for a distribution. For the corpus of a config, the number of the step."""


class SourceBatch(NamedTuple):
    """A batch of sequences, and where it comes from."""

    lengths: IntArray  # [S]
    origin: str
    vocab_size: int | None = None  # of the tokenizer of the corpus; None without a corpus


def read_batch(source: BatchConfig, data: DataConfig) -> SourceBatch:
    """Read or draw the batch. Raises ``DataError`` for a file that does not hold lengths."""
    if source.lengths is not None:
        return SourceBatch(read_lengths(source.lengths), str(source.lengths))
    if data.sources:
        batches, vocab_size = corpus_batches(data, first=source.seed, number=1)
        return SourceBatch(batches[0], f"step {source.seed} of {', '.join(data.sources)}", vocab_size)
    from bytescale.data.length_distributions import sample_lengths

    lengths = sample_lengths(source.distribution, data.batch_tokens, source.seed, data.context_length)
    if not len(lengths):
        raise ConfigError(
            f"a batch of data.batch_tokens = {data.batch_tokens} has no document of {source.distribution}",
            so="there is nothing to plan",
            fix="raise data.batch_tokens; the distributions begin at 512 tokens a document",
        )
    return SourceBatch(lengths, f"{source.distribution}, seed {source.seed}")


def corpus_batches(data: DataConfig, *, first: int, number: int) -> tuple[list[IntArray], int | None]:
    """Return the lengths of batches ``first`` to ``first + number - 1`` of a corpus, and the tokenizer's vocabulary."""
    from bytescale.data.loading.corpus import prepare_corpus
    from bytescale.data.order.batches import make_sampler

    corpus = prepare_corpus(data, text_later=True)
    sampler = make_sampler(corpus.index, data)
    for _ in range(first):
        sampler.next_batch()
    return [sampler.next_batch().lengths for _ in range(number)], corpus.metadata.vocab_size


def read_lengths(path: Path) -> IntArray:
    """Read ``[S]`` whole numbers of at least 1 from a .npy, .json or text file."""
    try:
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False)
        elif path.suffix == ".json":
            values = np.array(parse_json(path.read_text(encoding="utf-8")))
        else:
            values = np.array([float(word) for word in path.read_text(encoding="utf-8").replace(",", " ").split()])
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as lengths ({error})",
            fix="give a .npy file, a .json list, or a text file of numbers",
        ) from error
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.number) or not len(values):
        raise DataError(f"{path} does not hold a list of numbers", fix="give one number of tokens per sequence")
    wrong = np.flatnonzero((values < 1) | (values > MOST_COUNT) | (values != np.floor(values)))
    if len(wrong):
        raise DataError(
            f"{path}: entry {wrong[0]} is {values[wrong[0]]}",
            so="no sequence has that many tokens",
            fix=f"use whole numbers from 1 to {MOST_COUNT}",
        )
    return values.astype(np.int64)
