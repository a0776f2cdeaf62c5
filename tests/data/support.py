"""Small corpora for tests, on disk and in memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.config.schema import DataConfig
from bytescale.data.loading.assemble import Segments, labelled
from bytescale.data.loading.corpus import Corpus, prepare_corpus
from bytescale.data.loading.loader import Loader, StepData
from bytescale.data.order.batches import BatchSampler
from bytescale.data.order.epoch import MIB
from bytescale.data.order.index import CorpusIndex, PartFinder
from bytescale.data.sources.files import SourceFile
from bytescale.data.sources.records import WorkUnit
from bytescale.data.tokens.indexed import TokenIndex
from bytescale.data.tokens.open_parts import OpenParts
from bytescale.data.tokens.pairs import IndexedWriter, MetadataGatherer
from bytescale.data.tokens.samples import Samples
from bytescale.data.tokens.shards import PartContent, Shard
from bytescale.data.tokens.tokenizer import Tokenizer
from bytescale.plan import Planner


def write_pair(prefix: Path, documents: Sequence[Sequence[int]], tokenizer: Tokenizer | None = None) -> None:
    """A ``.bin/.idx`` pair of uint16 tokens, without metadata beside it unless ``tokenizer`` is given."""
    dtype = np.dtype("<u2")
    tokens = np.array([token for document in documents for token in document], dtype=dtype)
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    gatherer = MetadataGatherer(dtype)
    gatherer.add(tokens)
    path = prefix.with_name(f"{prefix.name}.bin")
    with IndexedWriter(path, dtype) as writer:
        writer.add_documents(tokens, lengths)
        writer.commit(gatherer.finish(lengths, tokenizer).to_json())
    if tokenizer is None:
        path.with_suffix(".meta.json").unlink()


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


class PartsAtHand:
    """A ``PartFinder`` of parts that have been read already."""

    parts_ahead = 1

    def __init__(self, contents: Sequence[PartContent]) -> None:
        self._contents = contents

    def expect(self, parts: Sequence[int]) -> None:
        """There is nothing to begin with."""

    def find(self, parts: Sequence[int]) -> list[PartContent]:
        return [self._contents[part] for part in parts]


def index_of(lengths: Sequence[int] | IntArray) -> TokenIndex:
    """Of documents of these lengths, with a byte for each token."""
    own = np.asarray(lengths, dtype=np.int64)
    pointers = np.cumsum(own) - own
    return TokenIndex(dtype=np.dtype("u1"), num_tokens=int(own.sum()), pointers=pointers, document_lengths=own)


def memory_corpus(
    lengths: Sequence[int],
    context_length: int,
    over_length: str = "split",
    num_parts: int = 1,
    *,
    part_mib: int = 0,
    num_bins: int = 0,
    finder: Callable[[list[PartContent]], PartFinder] = PartsAtHand,
    text_later: bool = False,
) -> Corpus:
    """A corpus of documents of these lengths whose tokens are their own places: 0, 1, 2, ...

    Its parts pretend to come from ``part_mib`` MiB of text each, and ``num_bins`` more to be ``.bin`` files.
    """
    num_all = num_parts + num_bins
    # Documents must not straddle parts: cut between documents.
    cuts = [len(lengths) * part // num_all for part in range(num_all + 1)]
    shards, parts, contents, first = [], [], [], 0
    for start, stop in itertools.pairwise(cuts):
        own = np.asarray(lengths[start:stop], dtype=np.int64)
        tokens = np.arange(first, first + own.sum(), dtype=np.int32)
        first += len(tokens)
        gatherer = MetadataGatherer(tokens.dtype)
        gatherer.add(tokens)
        parts.append(tokens)
        contents.append(PartContent(index=index_of(own), metadata=gatherer.finish(own)))
        if len(shards) < num_parts:
            shards.append(Shard(source=0, units=(WorkUnit(files=(), num_bytes=part_mib * MIB),)))
        else:
            shards.append(Shard(source=0, file=SourceFile(path=Path("b.bin"), format="bin", num_bytes=1, mtime_ns=0)))
    config = DataConfig(sources=("memory",), context_length=context_length, over_length=over_length)
    index = CorpusIndex(config, shards, None, finder(contents), text_later=text_later)
    return Corpus(parts=OpenParts(lambda part: (parts[part], {})), index=index, tokenizer=None)


def config(tmp_path: Path, *sources: object, **settings: Any) -> DataConfig:
    """Settings with a cache of their own and one worker."""
    values: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "num_workers": 1, **settings}
    return DataConfig(sources=tuple(str(source) for source in sources), **values)


def read(
    corpus: Corpus, samples: Sequence[int], starts: Sequence[int], stops: Sequence[int], names: Sequence[str] = ()
) -> tuple[IntArray, IntArray, dict[str, np.ndarray]]:
    """Tokens, labels and fields of ranges of samples, as a loader reads them."""
    columns = [np.array(column, dtype=np.int64).reshape(-1) for column in (samples, starts, stops)]
    segments = Segments.cut(named(corpus, samples), np.arange(len(columns[0])), *columns[1:], np.ones(len(columns[0])))
    return labelled(segments, corpus.parts.slices(segments.parts, segments.places, segments.ranges), names)


def named(corpus: Corpus, names: Sequence[int]) -> Samples:
    """The samples of these names."""
    known = corpus.samples
    return known[np.searchsorted(known.name, np.asarray(names, dtype=np.int64))]


def steps_of(
    corpus: Corpus, planner: Planner, rank: int = 0, *, stop_step: int | None = None, **data: Any
) -> Iterator[StepData]:
    """The steps of a rank, as its loader reads them; ``data``: settings of the ``[data]`` section."""
    return Loader(corpus, DataConfig(sources=("memory",), **data), rank).steps(planner, stop_step)


def sampler_of(
    index: CorpusIndex, batch_tokens: int, shuffle_seed: int, window_mib: int = 2**40, state: dict | None = None
) -> BatchSampler:
    """Of samples of any length that fit in ``batch_tokens``, at least 2."""
    settings: dict[str, Any] = {"batch_tokens": batch_tokens, "shuffle_seed": shuffle_seed, "context_length": 1}
    return BatchSampler(index, DataConfig(sources=("memory",), shuffle_window_mib=window_mib, **settings), state)


def read_whole(corpus: Corpus, samples: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Tokens and labels of whole samples."""
    lengths = named(corpus, samples).length
    return read(corpus, samples, np.zeros_like(lengths), lengths)[:2]


def texts_of(corpus: Corpus) -> list[str]:
    """The samples of a corpus as text."""
    assert corpus.tokenizer is not None
    return [corpus.tokenizer.decode(read_whole(corpus, [sample])[0]) for sample in corpus.samples.name.tolist()]


__all__ = ["config", "memory_corpus", "prepare_corpus", "read", "read_whole", "texts_of", "write_jsonl", "write_pair"]
