"""Encodes units of text (``data.sources.records``), with several processes, and writes what was encoded as a pair.

Results are written in the order of the units, so the pair does not depend on the number of processes.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.atomic import remove_stale_temporaries, temporary_path, write_atomically
from bytescale.common.errors import DataError
from bytescale.common.labels import OWN_FIELDS
from bytescale.common.units import format_count
from bytescale.config.schema import DataConfig
from bytescale.data.sources.records import ReadCounts, RecordKind, WorkUnit, iter_records, kind_of
from bytescale.data.tokens.chat import ChatTemplate, load_template
from bytescale.data.tokens.examples import Example, concatenated, example_of
from bytescale.data.tokens.fields import LABELS, WEIGHTS, field_dtype, without_field
from bytescale.data.tokens.indexed import MetadataGatherer, TokenMetadata, index_bytes, token_dtype
from bytescale.data.tokens.progress import Progress, ProgressCallback
from bytescale.data.tokens.tokenizer import Tokenizer
from bytescale.storage.retry import with_retries

_BATCH_CHARACTERS = 1 << 20
"""Text handed to the tokenizer at once. The tokenizer's results take some 100 bytes a token until they are arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedUnit:
    """The tokens of one unit of work."""

    tokens: NDArray[np.integer]  # [sum of lengths] tokens of all documents, each with its EOS
    lengths: IntArray  # [number of documents] tokens of each document
    num_bytes: int
    counts: ReadCounts
    fields: Mapping[str, NDArray] = field(default_factory=dict)  # [sum of lengths] each


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitEncoder:
    """Reads a unit and encodes it. Each worker process gets one copy."""

    tokenizer: Tokenizer
    config: DataConfig
    kind: RecordKind
    template: ChatTemplate | None = None
    """For conversations."""

    @staticmethod
    def of(config: DataConfig, tokenizer: Tokenizer) -> UnitEncoder:
        """Return what encodes the records of ``config``.

        Raises ``ConfigError`` if messages have no chat template, and ``DataError`` if the template is not one.
        """
        return UnitEncoder(
            tokenizer=tokenizer,
            config=config,
            kind=kind_of(config),
            template=load_template(config.chat_template, config.tokenizer) if config.content == "messages" else None,
        )

    @property
    def fingerprint(self) -> str:
        """A text that changes with the tokens that the same files give."""
        template = self.template.fingerprint if self.template else ""
        records = f"{self.config.content} {' '.join(self.config.fields)} {template}"
        return f"{self.config.text_key if self.kind.is_text else records} {self.tokenizer.fingerprint}"

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.tokenizer.vocab_size)

    @property
    def field_names(self) -> tuple[str, ...]:
        return {"text": (), "tokens": (WEIGHTS, LABELS, *self.config.fields)}.get(self.kind.content, (WEIGHTS,))

    def __call__(self, unit: WorkUnit) -> EncodedUnit:
        """Encode a unit; a read that may succeed later is tried again. Raises ``DataError`` as ``iter_records``."""
        encode = self._encode_texts if self.kind.is_text else self._encode_records
        return with_retries(partial(encode, unit), self.config.read_retries)

    def _encode_records(self, unit: WorkUnit) -> EncodedUnit:
        counts = ReadCounts(max_corrupt=self.config.max_corrupt_records)
        examples: list[Example] = []
        for record in iter_records(unit, self.kind, counts):
            try:
                examples.append(example_of(record, self.config, self.tokenizer, self.template))
            except DataError as error:
                counts.leave_out(error)
        tokens = [np.zeros(0, self.dtype), *(example.tokens.astype(self.dtype) for example in examples)]
        return EncodedUnit(
            tokens=np.concatenate(tokens),
            lengths=np.array([len(example.tokens) for example in examples], dtype=np.int64),
            num_bytes=unit.num_bytes,
            counts=counts,
            fields=concatenated(examples, self.field_names),
        )

    def _encode_texts(self, unit: WorkUnit) -> EncodedUnit:
        counts = ReadCounts(max_corrupt=self.config.max_corrupt_records)
        encoded: list[NDArray[np.integer]] = []
        texts: list[str] = []
        num_characters = 0
        for record in iter_records(unit, self.kind, counts):
            texts.append(record.values[self.config.text_key])
            num_characters += len(texts[-1])
            if num_characters >= _BATCH_CHARACTERS:
                encoded.extend(self.tokenizer.encode_batch(texts))
                texts, num_characters = [], 0
        encoded.extend(self.tokenizer.encode_batch(texts))
        documents = [ids for ids in encoded if len(ids)]  # the tokenizer's normaliser may leave nothing of a text
        counts.num_empty += len(encoded) - len(documents)
        end = np.array([self.tokenizer.eos_id])
        return EncodedUnit(
            tokens=np.concatenate([end[:0], *(part for ids in documents for part in (ids, end))]).astype(self.dtype),
            lengths=np.array([len(ids) + 1 for ids in documents], dtype=np.int64),
            num_bytes=unit.num_bytes,
            counts=counts,
        )


_MAX_LENGTH = np.iinfo(np.int32).max


class IndexedWriter:
    """Streams documents into a ``.bin`` and, at the end, writes its ``.idx``, without which no reader takes it.

    Leaving the ``with`` block without ``commit`` removes what was written. What a killed process leaves is removed by
    the next writer of the same pair.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._bin_path, self._idx_path = path, path.with_suffix(".idx")
        self._dtype = dtype
        self._lengths: list[NDArray[np.int32]] = []
        try:
            self._bin_path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale_temporaries(self._bin_path)
            self._temporary = temporary_path(self._bin_path)
            self._file = self._temporary.open("wb")
        except OSError as error:
            raise DataError(
                f"{self._bin_path} cannot be written ({error})", fix="choose a folder that you may write to"
            ) from error

    def add_documents(self, tokens: NDArray, lengths: IntArray) -> None:
        """Append documents: ``tokens [sum of lengths]``, or numbers of a field, and ``lengths [number of documents]``.

        Raises ``DataError`` for a document of more than 2^31 - 1 tokens, or a full disk.
        """
        assert len(tokens) == int(lengths.sum()), f"{len(tokens)} tokens for lengths that sum to {lengths.sum()}"
        if len(lengths) and lengths.max() > _MAX_LENGTH:
            raise DataError(
                f"a document of {lengths.max()} tokens is longer than the {_MAX_LENGTH} that .idx can hold",
                fix="split it into several documents",
            )
        try:
            self._file.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        except OSError as error:
            raise DataError(
                f"{self._temporary} cannot be written ({error})", fix="make room or choose another folder"
            ) from error
        self._lengths.append(lengths.astype("<i4"))

    @property
    def lengths(self) -> NDArray[np.int32]:
        """``[D]`` tokens of each document so far."""
        return np.concatenate([np.zeros(0, dtype="<i4"), *self._lengths])

    def commit(self, metadata: bytes | None) -> None:
        """Make the pair appear under its names, in place of an older one.

        ``metadata`` is the content of the ``.meta.json``; the pair of a field has none.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._idx_path.unlink(missing_ok=True)  # an old .idx must never stand beside the new .bin
        self._temporary.replace(self._bin_path)
        if metadata is not None:
            write_atomically(self._bin_path.with_suffix(".meta.json"), metadata)
        write_atomically(self._idx_path, index_bytes(self._dtype, self.lengths))

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def write_units(
    encoded: Iterable[EncodedUnit],
    path: Path,
    tokenizer: Tokenizer | None,
    dtype: np.dtype,
    fields: Sequence[str] = (),
) -> TokenMetadata:
    """Write units, in order, as the pair of ``path``, a ``.bin``: whole or not at all, in place of an older one.

    Args:
        tokenizer: the tokenizer that made the tokens; None if it is not known.
        dtype: integer type of the tokens in the file.
        fields: that are written beside the tokens. Units without weights or labels get those of ``without_field``.
            Labels are left out if all of them are their own tokens.

    Raises ``DataError`` if the disk is full.
    """
    gatherer, left_out = MetadataGatherer(dtype), ReadCounts()
    with ExitStack() as opened:
        writer = opened.enter_context(IndexedWriter(path, dtype))
        beside = {
            name: opened.enter_context(IndexedWriter(path.with_suffix(f".{name}.bin"), field_dtype(name)))
            for name in fields
        }
        gatherer.add_fields({name: np.zeros(0, field_dtype(name)) for name in fields})
        own_labels = LABELS in fields  # whether every label so far is its own token
        for unit in encoded:
            tokens = unit.tokens.astype(dtype, copy=False)
            writer.add_documents(tokens, unit.lengths)
            gatherer.add(tokens)
            for name, field_writer in beside.items():
                values = unit.fields[name] if name in unit.fields else without_field(name, unit.tokens)
                values = np.asarray(values).astype(field_dtype(name), copy=False)
                field_writer.add_documents(values, unit.lengths)
                gatherer.add_fields({name: values})
                own_labels &= name != LABELS or bool((values == tokens).all())
            left_out.add(unit.counts)
        if own_labels:
            gatherer.leave_out(LABELS)
            del beside[LABELS]  # what was written of them is removed in the end, because it is not committed
        metadata = gatherer.finish(writer.lengths, tokenizer, left_out)
        path.with_suffix(".idx").unlink(missing_ok=True)  # the old .idx must not stand beside new fields
        for name in OWN_FIELDS:  # nor old weights beside new tokens
            path.with_suffix(f".{name}.idx").unlink(missing_ok=True)
        for field_writer in beside.values():
            field_writer.commit(None)
        writer.commit(metadata.to_json())
    return metadata


def report_progress(
    encoded: Iterable[EncodedUnit], stage: str, total_bytes: int, progress: ProgressCallback
) -> Iterator[EncodedUnit]:
    done_bytes = num_documents = num_tokens = 0
    for unit in encoded:
        done_bytes += unit.num_bytes
        num_documents += len(unit.lengths)
        num_tokens += len(unit.tokens)
        note = f"{num_documents} documents, {format_count(num_tokens)} tokens"
        progress(Progress(stage=stage, done_bytes=done_bytes, total_bytes=total_bytes, note=note))
        yield unit


# Worker processes. They are spawned, not forked, because the parent may have threads and may use CUDA.


def encode_in_processes(units: Iterable[WorkUnit], encode: UnitEncoder, num_workers: int) -> Iterator[EncodedUnit]:
    """Encode ``units`` in processes, and yield the results in their order. Two units per process are under way."""
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(encode,),
    )
    pending: deque[Future[EncodedUnit]] = deque()
    try:
        for unit in units:
            if len(pending) >= 2 * num_workers:
                yield pending.popleft().result()
            pending.append(pool.submit(_encode_in_worker, unit))
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenises died",
            so="the corpus is incomplete and was thrown away",
            fix="see its message above; if there is none, it ran out of memory: lower data.num_workers. A script "
            'that calls this needs `if __name__ == "__main__":`',
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# This is the only module state of the data floor. A process pool has no other place for what a worker keeps.
_worker_encode: Callable[[WorkUnit], EncodedUnit] | None = None


def _start_worker(encode: UnitEncoder) -> None:
    global _worker_encode
    _worker_encode = encode
    # The switch of the tokenizers library for one thread per process: there is a process for each core already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _encode_in_worker(unit: WorkUnit) -> EncodedUnit:
    assert _worker_encode is not None, "the pool runs _start_worker first"
    return _worker_encode(unit)


def _die_with_parent() -> None:
    """End this worker when its parent ends. A worker whose parent was killed would wait for its next unit for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)
