"""Small corpora for tests, on disk and in memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bytescale.config import DataConfig
from bytescale.data.corpus import Corpus, CorpusFacts, CorpusIndex, prepare_corpus
from bytescale.data.facts import FactsGatherer
from bytescale.data.indexed import facts_path
from bytescale.data.indexed_writer import IndexedWriter
from bytescale.data.pieces import OverLength, make_pieces
from bytescale.data.tokenizer import Tokenizer


def write_pair(prefix: Path, documents: Sequence[Sequence[int]], tokenizer: Tokenizer | None = None) -> None:
    """A ``.bin/.idx`` pair of uint16 tokens, without facts beside it unless ``tokenizer`` is given."""
    dtype = np.dtype("<u2")
    tokens = np.array([token for document in documents for token in document], dtype=dtype)
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    gatherer = FactsGatherer(dtype)
    gatherer.add(tokens, lengths)
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_documents(tokens, lengths)
        writer.commit(gatherer.finish(tokenizer).to_json())
    if tokenizer is None:
        facts_path(prefix).unlink()


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def memory_corpus(
    lengths: Sequence[int], context_length: int, over_length: OverLength = "split", num_parts: int = 1
) -> Corpus:
    """A corpus of documents of these lengths whose tokens are their own places: 0, 1, 2, ..."""
    ends = np.cumsum(lengths)
    num_tokens = int(ends[-1])
    pieces, counts = make_pieces(ends - lengths, np.asarray(lengths, dtype=np.int64), context_length, over_length)
    # Documents must not straddle parts: cut between documents.
    cuts = [int(ends[len(lengths) * part // num_parts - 1]) if part else 0 for part in range(num_parts)]
    offsets = np.array([*sorted(cuts), num_tokens], dtype=np.int64)
    return Corpus(
        parts=tuple(np.arange(a, b, dtype=np.int32) for a, b in itertools.pairwise(offsets)),
        index=CorpusIndex(
            part_offsets=offsets,
            part_sources=np.zeros(num_parts, dtype=np.int64),
            pieces=pieces,
            facts=CorpusFacts(
                counts=counts,
                num_pieces=pieces.num_pieces,
                num_tokens=pieces.num_tokens,
                vocab_size=num_tokens,
                tokenizer=None,
                skipped_files=(),
                fingerprint=f"{list(lengths)} {context_length} {over_length}",
            ),
        ),
        tokenizer=None,
    )


def config(tmp_path: Path, *sources: object, **settings: Any) -> DataConfig:
    """Settings with a cache of their own and one worker."""
    values: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "num_workers": 1, **settings}
    return DataConfig(sources=tuple(str(source) for source in sources), **values)


def texts_of(corpus: Corpus) -> list[str]:
    """The pieces of a corpus as text."""
    assert corpus.tokenizer is not None
    return [corpus.tokenizer.decode(corpus.piece_tokens(piece)) for piece in range(corpus.pieces.num_pieces)]


__all__ = ["config", "memory_corpus", "prepare_corpus", "texts_of", "write_jsonl", "write_pair"]
