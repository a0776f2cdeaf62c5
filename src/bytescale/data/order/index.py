"""The index of a corpus: its parts, and the samples of the parts that have been read. The index holds no tokens.

The parts (``data.tokens.shards``) are known as soon as the files are listed, the samples of text only once it is
tokenised. Whoever needs the samples of some parts calls ``load``, and may announce it earlier with ``expect``. The
index keeps the samples that it was made with. Those that are loaded later belong to the caller, so that a corpus of any
size takes the memory of a window (``data.order.epoch``).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from bytescale.common.errors import DataError
from bytescale.config.schema import DataConfig
from bytescale.data.sources.records import check_corrupt_records
from bytescale.data.tokens.examples import UnitEncoder
from bytescale.data.tokens.pairs import TokenMetadata
from bytescale.data.tokens.samples import PartSamples, SampleCounts, SampleTable, make_samples
from bytescale.data.tokens.shards import PartContent, Shard, require_text

logger = logging.getLogger(__name__)


class PartFinder(Protocol):
    """Reads parts of the corpus for an index."""

    parts_ahead: int
    """How many parts, beyond those in use, should be expected so that no reader is idle."""

    def expect(self, parts: Sequence[int]) -> None:
        """Start to read ``parts``, which will be wanted soon, and return at once."""

    def find(self, parts: Sequence[int]) -> list[PartContent]:
        """Return the content of each of ``parts``. Raises ``DataError`` if one cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusMetadata:
    """A summary of the corpus: what a run reports, and what has to fit the model. It is small, so every rank has it."""

    num_parts: int
    num_parts_read: int
    """The other parts are text that has not been tokenised yet. The counts below do not include them."""
    counts: SampleCounts
    vocab_size: int
    """Ids that the model must have: the tokenizer's, or the highest id + 1 in ``.bin`` files made elsewhere."""
    tokenizer: str | None
    """Name of the tokenizer. None when all sources are ``.bin`` and no tokenizer.json is set."""
    puts_bos: bool
    """Whether texts and prompts were given the tokenizer's BOS (``data.bos``)."""
    num_pictures: int
    skipped_files: tuple[str, ...]
    """Files among the sources that were skipped because they are not text."""

    @property
    def is_complete(self) -> bool:
        return self.num_parts_read == self.num_parts


class CorpusIndex:
    """Says where every sample of the parts read so far lies. Drawing and planning global batches needs no more."""

    def __init__(
        self,
        config: DataConfig,
        shards: Sequence[Shard],
        encode: UnitEncoder | None,
        finder: PartFinder,
        *,
        text_later: bool = False,
    ) -> None:
        """Read all parts; with ``text_later``, only those that are tokens already. Raises as ``load``."""
        self._config = config
        self._shards = shards
        self._encode = encode  # None: all parts are .bin files, and no tokenizer is known
        self._finder = finder
        self._known: dict[int, TokenMetadata] = {}  # metadata of the parts read so far
        self._counts = SampleCounts()  # of these parts
        self.part_sources = np.array([shard.source for shard in shards], dtype=np.int64)
        """``[number of parts]`` place of each part's source in ``data.sources``."""
        self.is_text = np.array([shard.file is None for shard in shards], dtype=np.bool_)
        """``[number of parts]`` whether a part has to be tokenised before its samples are known."""
        self.part_bytes = np.array([shard.num_bytes for shard in shards], dtype=np.int64)
        """``[number of parts]`` bytes of the files that belong to each part."""
        self.has_weights = False
        """Whether some of the parts read so far have weights. Without any, every label has weight 1."""
        self.metadata: CorpusMetadata
        """Summary of the parts read so far. It is replaced and never changed, because other threads may read it."""
        first = [part for part in range(len(shards)) if not (text_later and self.is_text[part])]
        self._at_hand = dict(zip(first, self._read(first), strict=True))

    @property
    def num_parts(self) -> int:
        return len(self._shards)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of how the corpus is listed and cut, the same on every machine.

        They cover the sizes of the texts, the tokens of the ``.bin`` files, the tokenizer and the length settings. Of
        the content of texts, which is known only once they are read, see ``content_hash``.
        """
        config = self._config
        cut = (config.context_length, config.over_length, 1, None)  # the last two are of filters that are gone
        made_by = (self._encode.fingerprint,) if self._encode and self.is_text.any() else ()
        parts = [
            f"text {[unit.num_bytes for unit in shard.units]}" if shard.file is None else self._known[part].content_hash
            for part, shard in enumerate(self._shards)
        ]
        return _hash_of([*parts, *map(str, cut), *made_by])

    @property
    def token_bytes(self) -> int:
        """Bytes of a token on disk. Where the parts read so far differ, this is the largest."""
        return max((np.dtype(metadata.dtype).itemsize for metadata in self._known.values()), default=0)

    @property
    def parts_ahead(self) -> int:
        return self._finder.parts_ahead

    def expect(self, parts: Sequence[int]) -> None:
        """Announce that ``parts`` will be loaded soon."""
        if missing := [part for part in parts if part not in self._at_hand]:
            self._finder.expect(missing)

    def load(self, parts: Sequence[int]) -> SampleTable:
        """Return all samples of ``parts``, in their order. Waits until text among them is tokenised.

        Raises:
            DataError: a part cannot be read, has too many corrupt records or was made with another tokenizer; or all
                parts of the corpus have been read and hold nothing to train on.
        """
        missing = [part for part in parts if part not in self._at_hand]
        found = self._at_hand | dict(zip(missing, self._read(missing) if missing else (), strict=True))
        return SampleTable([found[part] for part in parts])

    def _read(self, parts: Sequence[int]) -> list[PartSamples]:
        contents = self._finder.find(parts)
        known = self._known | dict(zip(parts, (content.metadata for content in contents), strict=True))
        check_one_tokenizer(list(known.values()))
        if any(content.metadata.corrupt_records for content in contents):
            corrupt, limit = (
                [p for one in known.values() for p in one.corrupt_records],
                self._config.max_corrupt_records,
            )
            check_corrupt_records(corrupt, limit)
            logger.warning("the corpus is without %d corrupt records (%d are allowed)", len(corrupt), limit)
        found = []
        for part, content in zip(parts, contents, strict=True):
            samples, counts = make_samples(part, content.index, self._config)
            if content.trained is not None:
                self.has_weights = True
                samples = replace(samples, trained=content.trained)
                counts = replace(counts, num_untrained=int((content.trained[0] == 0).sum()))
            found.append(samples)
            if part not in self._known:
                self._counts += counts
        self._known = known
        read = [known[part] for part in sorted(known)]
        num_empty = self._counts.num_empty_documents + sum(metadata.num_empty_documents for metadata in read)
        vocabularies = [metadata.vocab_size or metadata.max_token_id + 1 for metadata in read]
        self.metadata = CorpusMetadata(
            num_parts=self.num_parts,
            num_parts_read=len(read),
            counts=replace(self._counts, num_empty_documents=num_empty),
            vocab_size=self._encode.tokenizer.vocab_size if self._encode else max(vocabularies, default=0),
            tokenizer=self._encode.tokenizer.name if self._encode else None,
            puts_bos=bool(self._encode and self._encode.puts_bos),
            num_pictures=sum(metadata.num_pictures for metadata in read),
            skipped_files=tuple(path for metadata in read for path in metadata.skipped_files),
        )
        for name, is_set in (("share_prefixes", self._config.share_prefixes), ("loader", self._config.loader == "ray")):
            require_text(is_set and self.metadata.num_pictures, f"data.{name}")
        if self.metadata.is_complete and not self._counts.num_samples:
            raise self.nothing_to_draw()
        return found

    def content_hash(self, parts: Iterable[int]) -> str:
        """16 hex digits, the hash of the tokens of ``parts``, which must have been read."""
        return _hash_of(self._known[part].content_hash for part in parts)

    def nothing_to_draw(self, source: int | None = None) -> DataError:
        """Return the error for a corpus, or for one ``source`` of it, that holds no sample at all."""
        if source is not None:
            return DataError(
                f"data source {self._config.sources[source]!r} has weight {self._config.weights[source]} but "
                "holds no sequence",
                so="its share of the tokens could not be drawn",
                fix="check the source and data.over_length, or leave it and its weight out",
            )
        found = self.metadata
        reasons = [
            f"{found.counts.num_dropped} documents are longer than data.context_length = {self._config.context_length}",
            f"{len(found.skipped_files)} files are not UTF-8 text",
        ]
        held = [reason for reason in reasons if not reason.startswith("0 ")] or ["no file holds any text"]
        return DataError(
            f"the corpus is empty: {' and '.join(held)} ({', '.join(self._config.sources)})",
            so="there is nothing to train on",
            fix="check data.sources, data.text_key and data.over_length",
        )


def check_one_tokenizer(metadata: Sequence[TokenMetadata]) -> None:
    """Raise ``DataError`` if ``metadata`` name different tokenizers."""
    known = {one.tokenizer_fingerprint: one.tokenizer for one in metadata if one.tokenizer_fingerprint}
    if len(known) > 1:
        raise DataError(
            f"the .bin sources were made with different tokenizers: {', '.join(map(str, known.values()))}",
            so="the same id would stand for different tokens",
            fix="tokenise all of them with the same tokenizer",
        )


def _hash_of(texts: Iterable[str]) -> str:
    return hashlib.blake2b(" ".join(texts).encode(), digest_size=8).hexdigest()
