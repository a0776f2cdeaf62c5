"""Shards: the parts of the corpus that any process can tokenise, keep and read on its own.

A shard of text is a run of units (``data.sources.records``) of one source. It is tokenised into a ``.bin/.idx`` pair
in the cache folder. A ``.bin`` file is a shard as it is. Where the shards are cut depends on the files alone, never
on the process that reads them. So the local loader and any number of servers share one cache, and a server that is
restarted finds in the cache the shards that it had tokenised.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bytescale.common.atomic import file_lock
from bytescale.common.errors import DataError, typed_path
from bytescale.common.labels import OWN_FIELDS
from bytescale.common.units import format_count
from bytescale.config.schema import DataConfig
from bytescale.data.sources.files import SourceFile
from bytescale.data.sources.records import UNIT_BYTES, ReadCounts, WorkUnit, iter_records, plan_units
from bytescale.data.tokens.examples import EncodedUnit, UnitEncoder
from bytescale.data.tokens.indexed import WEIGHTS, IndexedDataset, TokenIndex, Tokens, check_size, read_index
from bytescale.data.tokens.open_parts import RemoteTokens, local_copy
from bytescale.data.tokens.pairs import TokenMetadata, load_metadata, metadata_of, write_units
from bytescale.data.tokens.pictures import Picture, read_pictures
from bytescale.data.tokens.progress import Progress, ProgressCallback, ignore_progress
from bytescale.data.tokens.samples import Trained, make_samples, trained_of
from bytescale.data.tokens.tokenizer import Tokenizer
from bytescale.plan.plan import offsets_of
from bytescale.storage.place import Url
from bytescale.storage.retry import with_retries

SHARD_BYTES = 16 * 1024**2
"""Smallest size of a shard of text, in bytes. Tokenising it takes some seconds."""
MAX_SHARDS = 32768
"""About the most shards of text. Above half a TiB of text the shards grow, so that the cache has not too many files."""
COPIED_BYTES = 4 * 2**30
"""A remote ``.bin`` of up to that size is copied, because reading many small ranges takes many requests."""
_CACHE_VERSION = 2
_COPY_TOKENS = 1 << 22
_TOKENISING = "tokenising"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One part of the corpus: either units of text, or one ``.bin`` file."""

    source: int
    """Place of the shard's source in ``data.sources``."""
    units: tuple[WorkUnit, ...] = ()
    file: SourceFile | None = None
    name: str = ""
    """Name of the pair in the cache folder that holds the tokens of a shard of text."""

    @property
    def num_bytes(self) -> int:
        return sum(unit.num_bytes for unit in self.units) if self.file is None else self.file.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartContent:
    """What the corpus index needs to know of a part that was read."""

    index: TokenIndex
    metadata: TokenMetadata
    trained: Trained | None = None
    """None: every token has weight 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReader:
    """Tokenises and opens shards. It can be pickled."""

    config: DataConfig
    encode: UnitEncoder | None
    """None where all sources are ``.bin`` files and no tokenizer is set."""

    @staticmethod
    def of(config: DataConfig, tokenizer: Tokenizer | None) -> ShardReader:
        """Return the reader with the settings of ``config``. Raises as ``UnitEncoder.of``."""
        return ShardReader(config=config, encode=UnitEncoder.of(config, tokenizer) if tokenizer else None)

    @property
    def cache_dir(self) -> Path:
        return typed_path(self.config.cache_dir)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return None if self.encode is None else self.encode.tokenizer

    def plan(self, files: Sequence[SourceFile]) -> list[Shard]:
        """Cut ``files`` into shards: text in corpus order, then the ``.bin`` files. Raises as ``plan_units``."""
        text = [file for file in files if file.format != "bin"]
        least_bytes = max(SHARD_BYTES, sum(file.num_bytes for file in text) // MAX_SHARDS)
        shards: list[Shard] = []
        for source in sorted({file.source for file in text}):
            own = [file for file in text if file.source == source]
            units = with_retries(partial(plan_units, own, self._encode.kind, UNIT_BYTES))
            shards.extend(self._shard(source, run) for run in _runs(units, least_bytes))
        return shards + [Shard(source=file.source, file=file) for file in files if file.format == "bin"]

    def prepare(
        self, shards: Sequence[Shard], num_workers: int = 1, progress: ProgressCallback = ignore_progress
    ) -> None:
        """Tokenise those of ``shards`` that the cache does not have, with one pool of processes.

        A process that comes while another one does the same shards waits for it. Raises ``DataError`` as
        ``iter_records``; the shards that were finished before stay in the cache.
        """
        missing = self._missing(shards)
        if not missing:
            return
        total_bytes = sum(shard.num_bytes for shard in missing)
        progress(Progress(stage=_TOKENISING, done_bytes=0, total_bytes=total_bytes))
        names = hashlib.blake2b(" ".join(shard.name for shard in shards).encode(), digest_size=8).hexdigest()
        with file_lock(self.cache_dir / "tokens" / f"{names}.lock"):
            missing = self._missing(missing)
            num_workers = min(num_workers, len(missing))
            made = in_processes(self.tokenise, missing, num_workers) if num_workers > 1 else map(self.tokenise, missing)
            done_bytes = num_documents = num_tokens = 0
            for shard, metadata in zip(missing, made, strict=True):
                done_bytes += shard.num_bytes
                num_documents += metadata.num_documents
                num_tokens += metadata.num_tokens
                note = f"{num_documents} documents, {format_count(num_tokens)} tokens"
                progress(Progress(stage=_TOKENISING, done_bytes=done_bytes, total_bytes=total_bytes, note=note))

    def tokenise(self, shard: Shard) -> TokenMetadata:
        """Write the tokens of a shard of text into the cache, unless another process has just done so."""
        encode, path = self._encode, self._path(shard)
        with file_lock(path.with_suffix(".lock")):
            encoded = itertools.chain.from_iterable(map(encode, shard.units))
            return self._made(shard) or write_units(encoded, path, encode.tokenizer, encode.dtype, encode.field_names)

    def _missing(self, shards: Sequence[Shard]) -> list[Shard]:
        return [shard for shard in shards if shard.file is None and self._made(shard) is None]

    def open(self, shard: Shard, progress: ProgressCallback = ignore_progress) -> tuple[IndexedDataset, TokenMetadata]:
        """Open a shard: text that is prepared, or a ``.bin`` file.

        Raises ``DataError`` if the pair is broken, lacks a field, or was made with another tokenizer.
        """
        if shard.file is None:
            path = self._path(shard)
            metadata = load_metadata(path)
            assert metadata is not None, f"{path} is prepared before it is opened"
            return IndexedDataset.open(path, self.field_names), metadata
        dataset, metadata = self._open_bin(shard.file, progress)
        check_same_tokenizer(f"{shard.file.path}", metadata, self.tokenizer)
        if missing := set(self.config.fields) - set(dataset.fields):
            raise DataError(
                f"{shard.file.path} has no field {min(missing)!r}, which data.fields names",
                so="its documents would lack it",
                fix=f"put {dataset.path.stem}.{min(missing)}.bin and .idx beside it, or leave the field out",
            )
        return dataset, metadata

    def content(self, shard: Shard, progress: ProgressCallback = ignore_progress) -> PartContent:
        """What the corpus index needs to know of a shard that is prepared. Raises as ``open``."""
        dataset, metadata = self.open(shard, progress)
        if metadata.num_pictures and self.config.over_length != "drop":
            self._require_whole(shard, dataset.index.document_lengths)
        weights, trained = dataset.fields.get(WEIGHTS), None
        if weights is not None:
            samples, _ = make_samples(0, dataset.index, self.config)
            trained = trained_of(samples, np.asarray(weights), str(dataset.path.with_suffix(f".{WEIGHTS}.bin")))
        return PartContent(index=dataset.index, metadata=metadata, trained=trained)

    def pictures(self, shard: Shard) -> dict[int, list[Picture]]:
        """The pictures of a shard that is prepared, by the number of their document."""
        return read_pictures(self._path(shard)) if shard.file is None else {}

    def _require_whole(self, shard: Shard, lengths: NDArray[np.integer]) -> None:
        """Raise ``DataError`` for a document with pictures that would be cut."""
        for number in sorted(self.pictures(shard)):
            if lengths[number] > self.config.context_length:
                places = itertools.chain.from_iterable(map(self.places, shard.units))
                raise DataError(
                    f"{next(itertools.islice(places, number, None))()}: it has {lengths[number]} tokens with those of "
                    f"its pictures, and data.context_length is {self.config.context_length}",
                    so="it would be cut, perhaps in a picture",
                    fix="raise data.context_length, resize its pictures, or leave such records out: data.over_length "
                    '= "drop"',
                )

    def open_part(self, shard: Shard) -> tuple[Tokens, Mapping[str, Tokens]]:
        """Return the tokens of a shard, and its fields by name; text that the cache does not have is tokenised."""
        self.prepare([shard])
        dataset, _ = self.open(shard)
        return dataset.tokens, dataset.fields

    def places(self, unit: WorkUnit) -> Iterator[Callable[[], str]]:
        """Yield a function for each document of a unit, which returns the document's place."""
        counts = ReadCounts(max_corrupt=self.config.max_corrupt_records)
        yield from (record.place for record in iter_records(unit, self._encode.kind, counts))

    @property
    def _encode(self) -> UnitEncoder:
        assert self.encode is not None, "text needs a tokenizer"
        return self.encode

    @property
    def field_names(self) -> tuple[str, ...]:
        return (*OWN_FIELDS, *self.config.fields)

    def _open_bin(self, file: SourceFile, progress: ProgressCallback) -> tuple[IndexedDataset, TokenMetadata]:
        """Open a ``.bin`` file. A large remote one stays there if its metadata are known and ranges can be read."""
        path = file.path
        if isinstance(path, Url):
            copied = partial(local_copy, file, self.cache_dir, self.field_names)
            copy, has_ranges = with_retries(copied)
            index, metadata = read_index(copy.with_suffix(".idx")), load_metadata(copy)
            has_fields = any(copy.with_suffix(f".{name}.idx").exists() for name in self.field_names)
            is_large = file.num_bytes > COPIED_BYTES and not has_fields and not copy.exists()
            if is_large and has_ranges and metadata and metadata.describes(index):
                check_size(path, index, file.num_bytes)
                tokens = RemoteTokens(path, index.dtype, index.num_tokens)
                return IndexedDataset(path=copy, index=index, tokens=tokens), metadata
            path, _ = with_retries(partial(copied, whole=True))
        dataset = IndexedDataset.open(path, self.field_names)
        return dataset, metadata_of(dataset, file, self.cache_dir, progress)

    def _made(self, shard: Shard) -> TokenMetadata | None:
        path = self._path(shard)
        return load_metadata(path) if path.with_suffix(".idx").exists() else None

    def _path(self, shard: Shard) -> Path:
        return self.cache_dir / "tokens" / shard.name[:2] / f"{shard.name}.bin"

    def _shard(self, source: int, units: Sequence[WorkUnit]) -> Shard:
        settings = hashlib.blake2b(f"{_CACHE_VERSION} {self._encode.fingerprint}".encode(), digest_size=8)
        for unit in units:
            for file in unit.files:
                line = f"{file.path}\0{file.format}\0{file.num_bytes}\0{file.mtime_ns}\0{unit.start}\0{unit.stop}\n"
                settings.update(line.encode(errors="surrogateescape"))
        return Shard(source=source, units=tuple(units), name=settings.hexdigest())


def write_as_pair(
    reader: ShardReader,
    shards: Sequence[Shard],
    path: Path,
    num_workers: int = 1,
    progress: ProgressCallback = ignore_progress,
) -> TokenMetadata:
    """Write all documents of ``shards``, in order, as the pair of ``path``, a ``.bin``, which is replaced if it exists.

    Text is tokenised into the cache first, shard by shard: a process that was killed goes on behind the last one.
    Raises ``DataError`` as ``ShardReader.prepare`` and ``ShardReader.open``, or for a full disk.
    """
    of_bins = [reader.open(shard, progress)[1] for shard in shards if shard.file]  # errors come before the work
    reader.prepare(shards, num_workers, progress)
    known = of_bins + [reader.open(shard)[1] for shard in shards if shard.file is None]
    require_text(sum(metadata.num_pictures for metadata in known), "a .bin and .idx pair")
    total_bytes = sum(metadata.num_tokens * np.dtype(metadata.dtype).itemsize for metadata in known)

    def copied() -> Iterator[EncodedUnit]:
        done_bytes = 0
        for unit in itertools.chain.from_iterable(_documents_of(*reader.open(shard)) for shard in shards):
            done_bytes += unit.tokens.nbytes
            progress(Progress(stage=f"writing {path.name}", done_bytes=done_bytes, total_bytes=total_bytes))
            yield unit

    of_text = [reader.encode.dtype] if reader.encode is not None else []
    dtype = np.result_type(*of_text, *(metadata.dtype for metadata in known))
    fields = sorted(set(reader.field_names) & {name for metadata in known for name in metadata.fields})
    return write_units(copied(), path, reader.tokenizer, dtype, fields)


def require_text(num_pictures: int, what: str) -> None:
    """Raise ``DataError`` for documents with pictures, of which ``what`` knows nothing."""
    if num_pictures:
        raise DataError(
            f"the data has pictures, and {what} knows text alone",
            so="the model would not see them",
            fix="leave it out, and train on the JSONL or Parquet files by `bytescale train`, or by hdp.plan(documents)",
        )


def _documents_of(dataset: IndexedDataset, made: TokenMetadata) -> Iterator[EncodedUnit]:
    """Yield the documents of a shard, about ``_COPY_TOKENS`` at a time, and what was left out when it was tokenised."""
    offsets = offsets_of(dataset.index.document_lengths)
    skipped, corrupt = list(made.skipped_files), list(made.corrupt_records)
    counts = ReadCounts(num_empty=made.num_empty_documents, skipped_files=skipped, corrupt=corrupt)
    bounds = [0]
    while bounds[-1] < dataset.index.num_documents:
        stop = int(np.searchsorted(offsets, offsets[bounds[-1]] + _COPY_TOKENS, side="right")) - 1
        bounds.append(max(bounds[-1] + 1, stop))
    for first, stop in itertools.pairwise([0, *bounds]):  # the first range is empty
        lengths, own = np.diff(offsets[first : stop + 1]), slice(offsets[first], offsets[stop])
        counts.num_empty += int((lengths == 0).sum())
        yield EncodedUnit(
            tokens=dataset.tokens[own],
            lengths=lengths[lengths > 0],
            counts=counts,
            fields={name: values[own] for name, values in dataset.fields.items()},
        )
        counts = ReadCounts()


def check_same_tokenizer(place: str, metadata: TokenMetadata, tokenizer: Tokenizer | None) -> None:
    """Raise ``DataError`` if such tokens cannot have come from ``tokenizer``. With None, check nothing."""
    if tokenizer is None:
        return
    what = ""
    if metadata.tokenizer_fingerprint not in (None, tokenizer.fingerprint):
        what = f"was made with tokenizer {metadata.tokenizer!r}"
    elif metadata.max_token_id >= tokenizer.vocab_size:
        what = f"holds id {metadata.max_token_id}"
    if what:
        raise DataError(
            f"{place} {what}, but tokenizer {tokenizer.name!r} has the ids 0 to {tokenizer.vocab_size - 1}",
            so="the same id would stand for different tokens",
            fix="set data.tokenizer to the one that made them",
        )


def _runs(units: Iterable[WorkUnit], least_bytes: int) -> Iterator[list[WorkUnit]]:
    run: list[WorkUnit] = []
    for unit in units:
        run.append(unit)
        if sum(held.num_bytes for held in run) >= least_bytes:
            yield run
            run = []
    if run:
        yield run


# Worker processes. They are spawned, not forked, because the parent may have threads and may use CUDA.


def in_processes(
    work: Callable[[Shard], TokenMetadata], shards: Sequence[Shard], num_workers: int
) -> Iterator[TokenMetadata]:
    """Do ``work`` for each of ``shards`` in processes, and yield the results in their order."""
    pool = ProcessPoolExecutor(
        num_workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(work,)
    )
    try:
        yield from pool.map(_work_in_worker, shards)
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenises died",
            so="the corpus is incomplete",
            fix="see its message above; if there is none, it ran out of memory: lower data.num_workers. A script "
            'that calls this needs `if __name__ == "__main__":`',
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# This is the only module state of the data floor. A process pool has no other place for what a worker keeps.
_worker: Callable[[Shard], TokenMetadata] | None = None


def _start_worker(work: Callable[[Shard], TokenMetadata]) -> None:
    global _worker
    _worker = work
    # The switch of the tokenizers library for one thread per process: there is a process for each core already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _work_in_worker(shard: Shard) -> TokenMetadata:
    assert _worker is not None, "the pool runs _start_worker first"
    return _worker(shard)


def _die_with_parent() -> None:
    """End this worker when its parent ends. A worker whose parent was killed would wait for its next unit for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)
