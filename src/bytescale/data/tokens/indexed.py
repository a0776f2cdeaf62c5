"""Megatron's ``.bin/.idx`` pair: read memory-mapped, and written whole or not at all.

``.bin`` holds the token ids of all sequences, one after the other, in one integer type. ``.idx`` says where each
sequence starts::

    bytes  content
    9      b"MMIDIDX\\0\\0"
    8      version, uint64 = 1                       all numbers are little-endian
    1      code of the integer type (TOKEN_DTYPES)
    8      S, number of sequences, uint64
    8      D + 1, length of the document index, uint64
    4 S    tokens of each sequence, int32
    8 S    byte at which each sequence starts in .bin, int64
    8 D+8  number of the first sequence of each document, then S, int64

A document may consist of several sequences. They follow each other in ``.bin``, so a document is one token range.

A pair is named by the path of its ``.bin``. What belongs to it has another ending there: ``.idx``, ``.meta.json``
(``data.tokens.metadata``), and ``.weights.bin`` for the pair of a field (``data.tokens.fields``).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.atomic import remove_stale_temporaries, temporary_path, write_atomically
from bytescale.common.errors import DataError
from bytescale.common.labels import OWN_FIELDS
from bytescale.storage.place import Place

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TOKEN_DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Integer types by code. Codes 6 and 7 are floats, which are not token ids."""
NUMBER_DTYPES: dict[int, np.dtype] = {**TOKEN_DTYPES, 6: np.dtype("<f8"), 7: np.dtype("<f4")}
"""All types by code, for numbers that belong to tokens (``data.tokens.fields``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIndex:
    """The content of an ``.idx``. Shape letter: D documents."""

    dtype: np.dtype
    document_offsets: IntArray  # [D + 1] first token of each document in .bin, then the number of all tokens

    @property
    def num_documents(self) -> int:
        return len(self.document_offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.document_offsets[-1])

    @property
    def document_lengths(self) -> IntArray:
        """``[D]`` tokens of each document."""
        return np.diff(self.document_offsets)


class Tokens(Protocol):
    """The tokens of a pair: a memory map, or ``data.tokens.open_parts.RemoteTokens``."""

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, wanted: slice, /) -> NDArray[np.integer]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedDataset:
    """A ``.bin/.idx`` pair, open for reading."""

    path: Path
    index: TokenIndex
    tokens: Tokens  # [num_tokens] memory-mapped, in the file's own integer type
    fields: Mapping[str, Tokens] = field(default_factory=dict)
    """By name, a number for each token (``data.tokens.fields``)."""

    @staticmethod
    def open(path: Path, fields: Sequence[str] = OWN_FIELDS) -> IndexedDataset:
        """Open the pair whose ``.bin`` is ``path``, and those of ``fields`` that lie beside it.

        Raises:
            DataError: one of the two files is missing or broken, or they do not belong together; or a field has another
                number of documents or tokens.
        """
        index, tokens = _open(path, TOKEN_DTYPES)
        found = {}
        for name in fields:
            idx_path = path.with_suffix(f".{name}.idx")
            if not idx_path.exists():
                continue
            own, found[name] = _open(idx_path.with_suffix(".bin"), NUMBER_DTYPES)
            if not np.array_equal(own.document_offsets, index.document_offsets):
                raise DataError(
                    f"{idx_path} describes {own.num_documents} documents with {own.num_tokens} numbers, for "
                    f"{index.num_documents} documents with {index.num_tokens} tokens",
                    so="the numbers could not be given to their tokens",
                    fix="make both pairs from the same documents, or take this one away",
                )
        return IndexedDataset(path=path, index=index, tokens=tokens, fields=found)


def _open(path: Path, dtypes: Mapping[int, np.dtype]) -> tuple[TokenIndex, NDArray]:
    idx_path = path.with_suffix(".idx")
    if not path.exists():
        raise DataError(f"{path} does not exist", so=f"{idx_path} describes no tokens", fix="restore the .bin")
    index, num_bytes = read_index(idx_path, dtypes), path.stat().st_size
    check_size(path, index, num_bytes)
    # An empty file cannot be mapped.
    return index, np.memmap(path, index.dtype, "r") if num_bytes else np.zeros(0, index.dtype)


def check_size(bin_path: Place, index: TokenIndex, num_bytes: int) -> None:
    """Raise ``DataError`` if ``index`` cannot belong to a ``.bin`` of ``num_bytes`` bytes."""
    expected = index.num_tokens * index.dtype.itemsize
    if expected != num_bytes:
        raise DataError(
            f"{bin_path.with_suffix('.idx')} describes {index.num_tokens} tokens of {index.dtype.itemsize} bytes = "
            f"{expected} bytes, but {bin_path} has {num_bytes}",
            so="documents would be cut in the wrong places",
            fix="restore the pair from where it was made, or tokenise again",
        )


def read_index(path: Path, dtypes: Mapping[int, np.dtype] = TOKEN_DTYPES) -> TokenIndex:
    """Read and check an ``.idx``. ``dtypes``: the types that it may have, by code.

    Raises ``DataError`` if the file is missing, is not a Megatron index, or contradicts itself.
    """
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror})",
            so="without it a .bin has no document boundaries",
            fix="restore the .idx beside its .bin, or tokenise again",
        ) from error
    dtype, num_sequences, num_bounds = _read_header(path, content, dtypes)
    arrays = np.split(
        content[HEADER.size :], [4 * num_sequences, 12 * num_sequences, 12 * num_sequences + 8 * num_bounds]
    )
    lengths = arrays[0].view("<i4").astype(np.int64)
    pointers, bounds = arrays[1].view("<i8"), arrays[2].view("<i8")
    offsets = np.zeros(num_sequences + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if (lengths < 0).any() or not np.array_equal(pointers, offsets[:-1] * dtype.itemsize):
        raise _broken(path, "its sequences do not follow each other without gaps")
    if bounds[0] != 0 or bounds[-1] != num_sequences or (np.diff(bounds) < 0).any():
        raise _broken(path, f"its documents do not divide its {num_sequences} sequences")
    return TokenIndex(dtype=dtype, document_offsets=offsets[bounds])


def _read_header(path: Path, content: NDArray[np.uint8], dtypes: Mapping[int, np.dtype]) -> tuple[np.dtype, int, int]:
    """Return the integer type of the tokens, the number of sequences, and the length of the document index."""
    if len(content) < HEADER.size or content[: len(MAGIC)].tobytes() != MAGIC:
        raise DataError(
            f"{path} is not a Megatron index (it starts with {content[:9].tobytes()!r}, not {MAGIC!r})",
            fix="name the .idx of a memory-mapped Megatron data set; the older TNTIDX format is not supported",
        )
    _, version, code, num_sequences, num_bounds = HEADER.unpack(content[: HEADER.size].tobytes())
    if version != VERSION:
        raise DataError(f"{path} has version {version}, not {VERSION}", fix="tokenise again")
    if code not in dtypes:
        raise DataError(
            f"{path} holds values of type code {code}, which are not token ids",
            fix="use integer tokens; if the pair is a field of another one, name it in data.fields",
        )
    expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if expected != len(content) or num_bounds < 1:
        raise _broken(
            path,
            f"its header speaks of {num_sequences} sequences and {num_bounds - 1} documents, which take {expected} "
            f"bytes, but it has {len(content)}",
        )
    return dtypes[code], num_sequences, num_bounds


def _broken(path: Path, what: str) -> DataError:
    return DataError(f"{path} is broken: {what}", fix="restore it from where it was made, or tokenise again")


_MAX_LENGTH = np.iinfo(np.int32).max


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the integer type that Megatron uses for this vocabulary size: uint16 below 65500 ids, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


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
            for path in (self._bin_path, self._idx_path):
                remove_stale_temporaries(path)
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

    def commit(self, metadata: bytes | None) -> None:
        """Make the pair appear under its names, in place of an older one.

        ``metadata`` is the content of the ``.meta.json`` (``data.tokens.metadata``); the pair of a field has none.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._idx_path.unlink(missing_ok=True)  # an old .idx must never stand beside the new .bin
        self._temporary.replace(self._bin_path)
        if metadata is not None:
            write_atomically(self._bin_path.with_suffix(".meta.json"), metadata)
        write_atomically(self._idx_path, self._index())

    def _index(self) -> bytes:
        lengths = np.concatenate([np.zeros(0, dtype="<i4"), *self._lengths])
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], out=pointers[1:], dtype=np.int64)
        code = next(code for code, dtype in NUMBER_DTYPES.items() if dtype == self._dtype)
        bounds = np.arange(len(lengths) + 1, dtype="<i8")
        header = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(bounds))
        return b"".join((header, lengths.tobytes(), (pointers * self._dtype.itemsize).tobytes(), bounds.tobytes()))

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)
