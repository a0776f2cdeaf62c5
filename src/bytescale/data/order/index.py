"""The index of a corpus: its parts, and the samples of the parts that have been read. The index holds no tokens.

A corpus is a list of parts (``data.tokens.shards``). The list is known as soon as the files are listed. The samples
of a part are known later: a ``.bin`` file has an index of its own, which is read at once, but text has to be
tokenised first. So the corpus index grows. Whoever needs the samples of a part calls ``require``, and may announce it
earlier with ``expect``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.common.errors import DataError
from bytescale.config.schema import DataConfig
from bytescale.data.order.samples import GrowingSamples, SampleCounts, SampleTable, make_samples
from bytescale.data.tokens.metadata import TokenMetadata
from bytescale.data.tokens.shards import PartContent, Shard, check_corrupt_records, example_encoder
from bytescale.data.tokens.tokenizer import Tokenizer

_PART_SHIFT = 32
"""The name of a sample is ``(number of its part << _PART_SHIFT) + number of the sample in that part``."""


class PartFinder(Protocol):
    """Reads parts of the corpus for an index."""

    parts_ahead: int
    """How many parts, beyond those in use, should be expected so that no reader is idle."""

    def expect(self, parts: Sequence[int]) -> None:
        """Start to read ``parts``, which will be wanted soon, and return at once."""
        ...

    def find(self, parts: Sequence[int]) -> Mapping[int, PartContent]:
        """Return the content of each of ``parts``. Raises ``DataError`` if one cannot be read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusMetadata:
    """A summary of the corpus: what a run reports, and what has to fit the model. It is small, so every rank has it."""

    num_parts: int
    num_parts_read: int
    """The other parts are text that has not been tokenised yet. The counts below do not include them."""
    counts: SampleCounts
    num_samples: int
    num_tokens: int
    """Tokens of all samples, which is what an epoch trains on."""
    vocab_size: int
    """Ids that the model must have: the tokenizer's, or the highest id + 1 in ``.bin`` files made elsewhere."""
    tokenizer: str | None
    """Name of the tokenizer. None when all sources are ``.bin`` and no tokenizer.json is set."""
    skipped_files: tuple[str, ...]
    """Files among the sources that were skipped because they are not text."""
    fingerprint: str
    """See ``CorpusIndex.fingerprint``."""

    @property
    def is_complete(self) -> bool:
        """Whether this is of the whole corpus."""
        return self.num_parts_read == self.num_parts


class CorpusIndex:
    """Says where every sample of the parts read so far lies. Drawing and planning global batches needs no more."""

    def __init__(
        self,
        config: DataConfig,
        shards: Sequence[Shard],
        tokenizer: Tokenizer | None,
        finder: PartFinder,
        *,
        text_later: bool = False,
    ) -> None:
        """Read all parts; with ``text_later``, read only the parts that are tokens already.

        Raises:
            DataError: as ``require``.
        """
        self._config = config
        self._shards = shards
        self._tokenizer = tokenizer
        self._finder = finder
        self._known: dict[int, TokenMetadata] = {}  # metadata of the parts read so far, in the order of reading
        self._first_token = np.zeros(len(shards), dtype=np.int64)  # of each part read, counted over all parts read
        self._first_row = np.zeros(len(shards), dtype=np.int64)
        self._num_samples = np.zeros(len(shards), dtype=np.int64)
        self._num_tokens = self._num_documents = 0  # of all parts read, before any document was left out
        self._counts = SampleCounts()
        self.part_sources = np.array([shard.source for shard in shards], dtype=np.int64)
        """``[number of parts]`` place of each part's source in ``data.sources``."""
        self.is_text = np.array([shard.file is None for shard in shards], dtype=np.bool_)
        """``[number of parts]`` whether a part has to be tokenised before its samples are known."""
        self.part_bytes = np.array([shard.num_bytes for shard in shards], dtype=np.int64)
        """``[number of parts]`` bytes of the files that belong to each part."""
        self.has_weights = False
        """Whether some of the parts read so far have weights. Without any, every label has weight 1."""
        self.has_labels = False
        """Whether some of the parts read so far have labels of their own (``data.tokens.fields``)."""
        self._samples = GrowingSamples()
        self.metadata: CorpusMetadata
        """Summary of the parts read so far. It is replaced and never changed, because other threads may read it."""
        self._read([part for part in range(len(shards)) if not (text_later and self.is_text[part])])

    @property
    def samples(self) -> SampleTable:
        """Samples of the parts read so far, in the order of reading. ``start`` and ``document`` count in that order."""
        return self._samples.table

    @property
    def num_parts(self) -> int:
        return len(self._shards)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that identify how the corpus is listed and cut. They do not depend on machine or file times.

        The fingerprint covers the sizes of the texts, the tokens of the ``.bin`` files, the tokenizer and the length
        settings. It does not cover the content of the texts, which is known only once they are read: see
        ``content_hash``.
        """
        config = self._config
        cut = (config.context_length, config.over_length, config.min_document_tokens, config.max_document_tokens)
        made_by: tuple[str, ...] = ()
        if self._tokenizer and self.is_text.any():
            examples = example_encoder(config, self._tokenizer)
            made_by = (examples.fingerprint if examples else config.text_key, self._tokenizer.fingerprint)
        parts = [
            f"text {[unit.num_bytes for unit in shard.units]}" if shard.file is None else self._known[part].content_hash
            for part, shard in enumerate(self._shards)
        ]
        return _hash_of([*parts, *map(str, cut), *made_by])

    @property
    def is_complete(self) -> bool:
        """Whether every part has been read."""
        return len(self._known) == self.num_parts

    @property
    def token_bytes(self) -> int:
        """Bytes of a token on disk. Where the parts read so far differ, this is the largest."""
        return max((np.dtype(metadata.dtype).itemsize for metadata in self._known.values()), default=0)

    @property
    def parts_ahead(self) -> int:
        """How many parts should be expected beyond those in use."""
        return self._finder.parts_ahead

    def expect(self, parts: Sequence[int]) -> int:
        """Announce that ``parts`` will be required soon. Returns the number of ``parts``."""
        if missing := [part for part in parts if part not in self._known]:
            self._finder.expect(missing)
        return len(parts)

    def require(self, parts: Iterable[int]) -> None:
        """Wait until the samples of ``parts`` are known.

        Raises:
            DataError: a part cannot be read, has too many corrupt records or was made with another tokenizer; or all
                parts of the corpus have been read and hold nothing to train on.
        """
        if missing := [part for part in parts if part not in self._known]:
            self._read(missing)

    def _read(self, parts: Sequence[int]) -> None:
        found = self._finder.find(parts)
        known = [*self._known.values(), *(found[part].metadata for part in parts)]
        check_one_tokenizer(known)
        if any(found[part].metadata.corrupt_records for part in parts):
            check_corrupt_records(known, self._config.max_corrupt_records)
        for part in parts:
            table, counts = self._cut(found[part])
            self._known[part] = found[part].metadata
            self._first_token[part] = self._num_tokens
            self._first_row[part] = self._samples.num_samples
            self._num_samples[part] = table.num_samples
            self._samples.append(table)
            self._counts += counts
            self._num_tokens += int(found[part].document_offsets[-1])
            self._num_documents += len(found[part].document_offsets) - 1
        self.metadata = self._metadata()
        if self.is_complete and not self.samples.num_samples:
            raise self.nothing_to_draw()

    def samples_of(self, parts: Iterable[int]) -> IntArray:
        """``[P]`` names of all samples of ``parts``, in the order of ``parts``, which must have been read."""
        names = [(part << _PART_SHIFT) + np.arange(self._num_samples[part]) for part in parts]
        return np.concatenate([np.zeros(0, dtype=np.int64), *names])

    def rows(self, samples: IntArray) -> IntArray:
        """``[P]`` row in ``self.samples`` of each of the samples named ``samples``."""
        return self._first_row[samples >> _PART_SHIFT] + (samples & ((1 << _PART_SHIFT) - 1))

    def locate(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """Return the part that holds each of ``samples``, and the place of its first token there; int64 ``[P]``."""
        part = samples >> _PART_SHIFT
        return part, self.samples.start[self.rows(samples)] - self._first_token[part]

    def content_hash(self, parts: Iterable[int]) -> str:
        """16 hex digits, the hash of the tokens of ``parts``, which must have been read."""
        return _hash_of(self._known[part].content_hash for part in parts)

    def _metadata(self) -> CorpusMetadata:
        known = [self._known[part] for part in sorted(self._known)]
        num_empty = self._counts.num_empty_documents + sum(metadata.num_empty_documents for metadata in known)
        vocabularies = [metadata.vocab_size or metadata.max_token_id + 1 for metadata in known]
        return CorpusMetadata(
            num_parts=self.num_parts,
            num_parts_read=len(known),
            counts=replace(self._counts, num_empty_documents=num_empty),
            num_samples=self.samples.num_samples,
            num_tokens=self.samples.num_tokens,
            vocab_size=max(vocabularies, default=0) if self._tokenizer is None else self._tokenizer.vocab_size,
            tokenizer=self._tokenizer.name if self._tokenizer else None,
            skipped_files=tuple(path for metadata in known for path in metadata.skipped_files),
            fingerprint=self.fingerprint,
        )

    def nothing_to_draw(self, source: int | None = None) -> DataError:
        """Return the error for a corpus, or for one ``source`` of it, that holds no sample at all."""
        if source is not None:
            return DataError(
                f"data source {self._config.sources[source]!r} has weight {self._config.weights[source]} but "
                "holds no sequence",
                so="its share of the tokens could not be drawn",
                fix="check the source and the length filters, or leave it and its weight out",
            )
        found = self.metadata
        reasons = [
            f"{found.counts.num_dropped} documents are longer than data.context_length = {self._config.context_length}",
            f"{found.counts.num_filtered} documents are outside data.min_document_tokens and data.max_document_tokens",
            f"{len(found.skipped_files)} files are not UTF-8 text",
        ]
        held = [reason for reason in reasons if not reason.startswith("0 ")] or ["no file holds any text"]
        return DataError(
            f"the corpus is empty: {' and '.join(held)} ({', '.join(self._config.sources)})",
            so="there is nothing to train on",
            fix="check data.sources, data.text_key and data.over_length",
        )

    def _cut(self, content: PartContent) -> tuple[SampleTable, SampleCounts]:
        """Cut a part into samples, numbered behind those of the parts that were read before."""
        table, counts = make_samples(
            content.document_offsets[:-1] + self._num_tokens,
            np.diff(content.document_offsets),
            self._config.context_length,
            self._config.over_length,
            self._config.min_document_tokens,
            self._config.max_document_tokens,
        )
        self.has_labels |= content.has_labels
        if content.weights is not None:
            self.has_weights = True
            first = table.start - self._num_tokens + 1  # the label of a token is the next one
            num_trained, weight_sums = content.weights.sums(first, first + table.num_targets)
            table = replace(table, num_trained=num_trained, weight_sums=weight_sums)
        return replace(table, document=table.document + self._num_documents), counts


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
