"""How pairs of tokens are written, and their metadata.

``.meta.json`` has what the index does not hold. ``bytescale data tokenize`` writes it. A pair that another program made
has no such file. It is read through once, for its highest token id and the hash of its content, and the result is kept
in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray, blocks
from bytescale.common.atomic import remove_stale_temporaries, temporary_path, write_atomically
from bytescale.common.errors import DataError
from bytescale.common.labels import OWN_FIELDS
from bytescale.common.parsing import parse_json, read_input
from bytescale.data.sources.files import SourceFile, fingerprint_files
from bytescale.data.sources.records import ReadCounts
from bytescale.data.tokens.examples import EncodedUnit
from bytescale.data.tokens.indexed import LABELS, IndexedDataset, TokenIndex, field_dtype, index_bytes, without_field
from bytescale.data.tokens.pictures import Picture, write_pictures
from bytescale.data.tokens.progress import Progress, ProgressCallback
from bytescale.data.tokens.tokenizer import Tokenizer

_SCAN_TOKENS = 1 << 24
_LATER = ("fields", "num_pictures")  # names that metadata without them do not have
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
    encoded: Iterable[EncodedUnit], path: Path, tokenizer: Tokenizer | None, dtype: np.dtype, fields: Sequence[str] = ()
) -> TokenMetadata:
    """Write units, in order, as the pair of ``path``, a ``.bin``: whole or not at all, in place of an older one.

    Args:
        tokenizer: the tokenizer that made the tokens; None if it is not known.
        dtype: integer type of the tokens in the file.
        fields: that are written beside the tokens. Units without weights or labels get those of ``without_field``.
            Labels are left out if all of them are their own tokens.

    Raises ``DataError`` if the disk is full.
    """
    gatherer, left_out = MetadataGatherer(dtype, fields), list[ReadCounts]()
    with ExitStack() as opened:
        writer = opened.enter_context(IndexedWriter(path, dtype))
        beside = {
            name: opened.enter_context(IndexedWriter(path.with_suffix(f".{name}.bin"), field_dtype(name)))
            for name in fields
        }
        pictures = dict[int, Sequence[Picture]]()
        own_labels = LABELS in fields  # whether every label so far is its own token
        for unit in encoded:
            tokens, values = unit.tokens.astype(dtype, copy=False), {}
            for name, field_writer in beside.items():
                given = unit.fields[name] if name in unit.fields else without_field(name, unit.tokens)
                values[name] = np.asarray(given).astype(field_dtype(name), copy=False)
                field_writer.add_documents(values[name], unit.lengths)
            pictures |= {len(writer.lengths) + number: own for number, own in unit.pictures.items()}
            writer.add_documents(tokens, unit.lengths)
            gatherer.add(tokens, values)
            own_labels = own_labels and bool((values[LABELS] == tokens).all())
            left_out.append(unit.counts)
        if own_labels:
            gatherer.leave_out(LABELS)
            del beside[LABELS]  # what was written of them is removed in the end, because it is not committed
        metadata = gatherer.finish(writer.lengths, tokenizer, left_out, pictures)
        path.with_suffix(".idx").unlink(missing_ok=True)  # the old .idx must not stand beside new fields
        for name in OWN_FIELDS:  # nor old weights beside new tokens
            path.with_suffix(f".{name}.idx").unlink(missing_ok=True)
        write_pictures(path, pictures)
        for field_writer in beside.values():
            field_writer.commit(None)
        writer.commit(metadata.to_json())
    return metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMetadata:
    """Metadata of one pair. A field is None where it is not known, because another program made the pair."""

    num_documents: int
    num_tokens: int
    longest_document_tokens: int
    max_token_id: int
    """Of tokens and labels; -1 when there is no token."""
    dtype: str
    content_hash: str
    """16 hex digits of the integer type, the tokens and the lengths. Paths and times of the files do not matter."""
    lengths_hash: str
    tokenizer: str | None = None
    tokenizer_fingerprint: str | None = None
    vocab_size: int | None = None
    eos_id: int | None = None
    num_empty_documents: int = 0
    skipped_files: tuple[str, ...] = ()
    corrupt_records: tuple[str, ...] = ()
    """For each corrupt record that was left out: what was wrong with it, and where it is."""
    fields: tuple[str, ...] = ()
    """The fields beside the tokens (``data.tokens.indexed``), in the order of their names. The content hash covers
    them."""
    num_pictures: int = 0
    """Pictures of its documents (``data.tokens.pictures``). The content hash covers their names."""

    def to_json(self) -> bytes:
        content = asdict(self)
        for name in _LATER:
            if not content[name]:
                del content[name]  # the file is then as it was before there were any
        return json.dumps(content, indent=2).encode()

    def describes(self, index: TokenIndex) -> bool:
        """Return whether these metadata fit a pair that has this index."""
        return (self.num_tokens, self.dtype) == (index.num_tokens, index.dtype.str) and (
            self.lengths_hash == _hash(index.document_lengths[own] for own in blocks(index.num_documents))
        )


class MetadataGatherer:
    """Gathers the metadata of a pair while its tokens are written or read."""

    def __init__(self, dtype: np.dtype, fields: Iterable[str] = ()) -> None:
        self._dtype = dtype
        self._tokens_hash = hashlib.blake2b(dtype.str.encode(), digest_size=8)
        self._max_token_id = -1
        self._field_hashes = {name: hashlib.blake2b(name.encode(), digest_size=8) for name in fields}

    def add(self, tokens: NDArray[np.integer], fields: Mapping[str, NDArray] = MappingProxyType({})) -> None:
        """Add the next tokens, in the type of the file, and their fields. Raises ``DataError`` for ids below 0."""
        assert tokens.dtype == self._dtype, f"{tokens.dtype} tokens for a file of {self._dtype}"
        self._tokens_hash.update(np.ascontiguousarray(tokens).data)
        self._see(tokens, "tokens")
        for name, values in fields.items():
            self._field_hashes[name].update(np.ascontiguousarray(values, dtype=field_dtype(name)).data)
            if name == LABELS:
                self._see(values, name)

    def _see(self, ids: NDArray, what: str) -> None:
        if not len(ids):
            return
        self._max_token_id = max(self._max_token_id, int(ids.max()))
        if int(ids.min()) < 0:
            raise DataError(
                f"a pair of {what} holds {int(ids.min())}",
                so="no token has this id",
                fix="write the token itself where nothing is trained on, and weight 0 for it"
                if what == LABELS
                else "tokenise again",
            )

    def leave_out(self, name: str) -> None:
        del self._field_hashes[name]

    def finish(
        self, lengths: NDArray[np.integer], tokenizer: Tokenizer | None = None, left_out: Sequence[ReadCounts] = (),
        pictures: Mapping[int, Sequence[Picture]] = MappingProxyType({}),
    ) -> TokenMetadata:  # fmt: skip
        """Return the metadata of documents of these ``lengths [D]``. ``tokenizer`` is None if it is not known."""
        lengths = lengths.astype("<i8", copy=False)
        lengths_hash = _hash([lengths])
        self._tokens_hash.update(lengths_hash.encode())
        for number, own in pictures.items():
            self._tokens_hash.update(f"{number} {[picture.name for picture in own]}".encode())
        for name in sorted(self._field_hashes):
            self._tokens_hash.update(self._field_hashes[name].digest())
        return TokenMetadata(
            fields=tuple(sorted(self._field_hashes)),
            num_pictures=sum(map(len, pictures.values())),
            num_documents=len(lengths),
            num_tokens=int(lengths.sum()),
            longest_document_tokens=int(lengths.max(initial=0)),
            max_token_id=self._max_token_id,
            dtype=self._dtype.str,
            content_hash=self._tokens_hash.hexdigest(),
            lengths_hash=lengths_hash,
            tokenizer=tokenizer.name if tokenizer else None,
            tokenizer_fingerprint=tokenizer.fingerprint if tokenizer else None,
            vocab_size=tokenizer.vocab_size if tokenizer else None,
            eos_id=tokenizer.eos_id if tokenizer else None,
            num_empty_documents=sum(counts.num_empty for counts in left_out),
            skipped_files=tuple(path for counts in left_out for path in counts.skipped_files),
            corrupt_records=tuple(what for counts in left_out for what in counts.corrupt),
        )


def metadata_of(
    dataset: IndexedDataset, file: SourceFile, cache_dir: Path, progress: ProgressCallback
) -> TokenMetadata:
    """Return the metadata of a pair, which are looked for beside it, then in the cache; else it is read through.

    Raises ``DataError`` if the pair was made with fields that have vanished.
    """
    cached = cache_dir / "metadata" / f"{_key_of(dataset, file)}.bin"  # there is no such file, but its .meta.json
    for path in (dataset.path, cached):
        metadata = load_metadata(path)
        if metadata is None or not metadata.describes(dataset.index):
            continue
        lost = [name for name in metadata.fields if not dataset.path.with_suffix(f".{name}.idx").exists()]
        if lost:
            raise DataError(
                f"{dataset.path} was made with {' and '.join(lost)}, which do not lie beside it",
                so="its tokens would be trained on as if they had none",
                fix=f"restore {dataset.path.stem}.{lost[0]}.bin and .idx",
            )
        if set(metadata.fields) >= set(dataset.fields):
            return metadata
    metadata = _scan(dataset, progress)
    cached.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(cached.with_suffix(".meta.json"), metadata.to_json())
    return metadata


def load_metadata(path: Path) -> TokenMetadata | None:
    """Return the metadata that stand beside a pair, or None if there are none that can be read."""
    try:
        content = parse_json(read_input(path.with_suffix(".meta.json")))
    except (OSError, ValueError):  # the file is absent, or another program's: the metadata are gathered again
        return None
    names = {spec.name for spec in fields(TokenMetadata)}
    if not isinstance(content, dict) or set(content).union(_LATER) != names:
        return None
    lists = {name: tuple(content.get(name, ())) for name in ("skipped_files", "corrupt_records", "fields")}
    return TokenMetadata(**{**content, **lists})


def _key_of(dataset: IndexedDataset, file: SourceFile) -> str:
    """A name that changes when the pair or one of its fields is replaced."""
    beside = []
    for name in sorted(dataset.fields):
        path = dataset.path.with_suffix(f".{name}.bin")
        found = path.stat()
        beside.append(SourceFile(path=path, format="bin", num_bytes=found.st_size, mtime_ns=found.st_mtime_ns))
    return fingerprint_files([file, *beside])


def _scan(dataset: IndexedDataset, progress: ProgressCallback) -> TokenMetadata:
    gatherer = MetadataGatherer(dataset.index.dtype, dataset.fields)
    itemsize, stage = dataset.index.dtype.itemsize, f"reading {dataset.path.name} through"
    for start in range(0, dataset.index.num_tokens, _SCAN_TOKENS):
        part = dataset.tokens[start : start + _SCAN_TOKENS]
        gatherer.add(part, {name: values[start : start + _SCAN_TOKENS] for name, values in dataset.fields.items()})
        done_bytes, total_bytes = (start + len(part)) * itemsize, dataset.index.num_tokens * itemsize
        progress(Progress(stage=stage, done_bytes=done_bytes, total_bytes=total_bytes))
    return gatherer.finish(dataset.index.document_lengths)


def _hash(arrays: Iterable[NDArray]) -> str:
    content = hashlib.blake2b(digest_size=8)
    for array in arrays:
        content.update(np.ascontiguousarray(array, dtype="<i8").data)
    return content.hexdigest()
