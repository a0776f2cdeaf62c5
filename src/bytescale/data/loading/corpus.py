"""The corpus: the tokens on disk of everything that ``[data]`` names, and the samples to train on.

The launcher and every rank may call ``prepare_corpus`` at the same time. The first caller does the work; the others
wait for it and open what it wrote.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from bytescale.common.errors import ConfigError
from bytescale.config.schema import DataConfig
from bytescale.config.validate import check_content
from bytescale.data.loading.assemble import MicroBatchData, Segments, assemble, labelled
from bytescale.data.order.index import CorpusIndex, CorpusMetadata, PartContent
from bytescale.data.sources.files import SourceFile, expand_sources
from bytescale.data.tokens.indexed import WEIGHTS
from bytescale.data.tokens.open_parts import MOST_OPEN, OpenParts, PartReader, Slice
from bytescale.data.tokens.pictures import Picture
from bytescale.data.tokens.progress import Progress, ProgressCallback, ignore_progress
from bytescale.data.tokens.samples import Samples
from bytescale.data.tokens.shards import Shard, ShardReader
from bytescale.data.tokens.tokenizer import Tokenizer, choose_tokenizer
from bytescale.plan.rank_plan import RankPlan
from bytescale.storage.retry import with_retries


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The tokens of a corpus, and the samples that they are cut into."""

    parts: PartReader
    """Tokens and fields of each shard of text, then of each ``.bin`` source."""
    index: CorpusIndex
    further_fields: tuple[str, ...] = ()
    """Fields that every part has: those of ``data.fields``."""
    tokenizer: Tokenizer | None
    """None when all sources are ``.bin`` and no tokenizer.json is set."""
    pictures: Callable[[int], Mapping[int, Sequence[Picture]]] = lambda part: {}
    """Of a part, by the number of their document."""
    close: Callable[[], None] = lambda: None
    """Ends the thread that tokenises in the background, or the servers that this process has started."""

    @property
    def metadata(self) -> CorpusMetadata:
        """Summary of the parts read so far."""
        return self.index.metadata

    @property
    def samples(self) -> Samples:
        """All samples, ordered by the number of their part."""
        return self.index.load(range(self.index.num_parts))[:]

    def pictures_of(self, samples: Samples) -> dict[int, Sequence[Picture]]:
        """Those of the samples that have some, by their rows."""
        if not self.metadata.num_pictures:
            return {}
        places = zip(samples.part.tolist(), samples.document.tolist(), strict=True)
        found = ((row, self.pictures(part).get(document)) for row, (part, document) in enumerate(places))
        return {row: pictures for row, pictures in found if pictures}

    def micro_batches(self, rank_plan: RankPlan, segments: Segments) -> tuple[MicroBatchData, ...]:
        """Read the ``segments`` of ``rank_plan``. Nothing else is read."""
        return assemble(rank_plan, segments, self._slices(segments), self.further_fields)

    def documents(self, samples: Samples, fields: Sequence[str] = (WEIGHTS,)) -> list[dict[str, NDArray]]:
        """Return samples as ``HDP.plan`` takes documents: ``tokens``, ``labels`` and the fields of ``labelled``."""
        segments = Segments.whole(samples)
        tokens, labels, found = labelled(segments, self._slices(segments), fields)
        columns: dict[str, NDArray] = {"tokens": tokens, "labels": labels, **found}
        bounds = np.cumsum(samples.length)[:-1]
        parts = {name: np.split(values, bounds) for name, values in columns.items()}
        return [{name: own[number] for name, own in parts.items()} for number in range(len(samples))]

    def _slices(self, segments: Segments) -> list[Slice]:
        return self.parts.slices(segments.parts, segments.places, segments.ranges)


def prepare_corpus(
    config: DataConfig, progress: ProgressCallback = ignore_progress, *, text_later: bool = False, ahead: bool = False
) -> Corpus:
    """Tokenise the sources of ``config``, as far as the cache does not have them, and open the corpus.

    With ``text_later``, a part of the text is tokenised only when it is first needed (``CorpusIndex.load``). With
    ``ahead``, a thread in the background also tokenises the parts that are expected, until ``Corpus.close``. Several
    processes may call this function at the same time.

    Raises ``ConfigError`` if a source matches nothing, or there is no such tokenizer; ``DataError`` if a file is
    broken, the corpus is empty, or a ``.bin`` was made with another tokenizer.
    """
    shards, reader = plan_shards(config, progress)
    finder = TokeniseHere(shards, reader, progress, ahead=ahead)
    return Corpus(
        parts=OpenParts(lambda part: reader.open_part(shards[part])),
        index=CorpusIndex(config, shards, reader.encode, finder, text_later=text_later),
        further_fields=config.fields,
        tokenizer=reader.tokenizer,
        pictures=lru_cache(MOST_OPEN)(lambda part: reader.pictures(shards[part])),
        close=finder.close,
    )


def place_of_document(config: DataConfig, part: int, number: int) -> str:
    """Return where document ``number`` of a part of a corpus is, counted from 0: its file, and line or row.

    The part is read again, so this is for error messages. It fits corpora from which no document was left out.
    """
    shards, reader = plan_shards(config)
    if (file := shards[part].file) is not None:
        return f"{file.path}, document {number}"
    places = itertools.chain.from_iterable(map(reader.places, shards[part].units))
    return next(itertools.islice(places, number, None))()


class TokeniseHere:
    """A ``PartFinder`` that tokenises in this process and its workers. It waits if another process does so already."""

    parts_ahead = 1

    def __init__(
        self, shards: Sequence[Shard], reader: ShardReader, progress: ProgressCallback, *, ahead: bool
    ) -> None:
        """With ``ahead``, ``expect`` starts to tokenise in a thread; without it, it does nothing."""
        self._shards = shards
        self._reader = reader
        self._progress = progress
        self._ahead = ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bytescale-tokeniser")

    def expect(self, parts: Sequence[int]) -> None:
        """Tokenise ``parts`` in a thread. An error there is not reported: ``find`` meets it again and raises it."""
        if self._ahead:
            shards = [self._shards[part] for part in parts]
            self._thread.submit(self._reader.prepare, shards, self._reader.config.num_workers, self._stop_if_closed)

    def find(self, parts: Sequence[int]) -> list[PartContent]:
        shards = [self._shards[part] for part in parts]
        self._reader.prepare(shards, self._reader.config.num_workers, self._progress)
        contents = (self._reader.content(shard, self._progress) for shard in shards)
        # Each map takes a file handle.
        return list(contents if len(self._shards) <= MOST_OPEN else map(deepcopy, contents))

    def close(self) -> None:
        """End the thread, after the unit of text (``data.sources.records``) that it works on."""
        self._ahead = False
        self._thread.shutdown(cancel_futures=True)

    def _stop_if_closed(self, _: Progress) -> None:
        if not self._ahead:
            raise InterruptedError("nobody wants this any more")


def plan_shards(config: DataConfig, progress: ProgressCallback = ignore_progress) -> tuple[list[Shard], ShardReader]:
    """List the sources, find or train the tokenizer, and cut the corpus into shards, which the reader opens."""
    files = list_sources(config)
    reader = ShardReader.of(config, choose_tokenizer(config, files, progress))
    return reader.plan(files), reader


def list_sources(config: DataConfig) -> list[SourceFile]:
    """List the files of the corpus. Raises as ``expand_sources``, and for contents that do not fit."""
    check_content(config)
    return with_retries(partial(expand_sources, config.sources, config.format, config.fields))


def check_vocabulary(corpus: CorpusMetadata, vocab_size: int) -> None:
    """Raise ``ConfigError`` if the corpus may hold ids that a model of ``vocab_size`` rows does not have."""
    source = f"tokenizer {corpus.tokenizer!r}" if corpus.tokenizer else "the .bin files among the sources"
    check_ids(source, corpus.vocab_size, vocab_size)


def check_ids(source: str, num_ids: int, vocab_size: int) -> None:
    """Raise ``ConfigError`` if ``source`` may give ids that a model of ``vocab_size`` rows does not have."""
    if num_ids > vocab_size:
        raise ConfigError(
            f"{source} has ids up to {num_ids - 1}, but the model's vocab_size is {vocab_size}",
            so="the model has no embedding for some of them",
            fix="use the tokenizer that belongs to the model's weights; for a new model, set vocab_size "
            f"of model.config to at least {num_ids}, or leave it out to follow the tokenizer",
        )
