"""Megatron's ``.bin/.idx`` pair: its format, and how it is read, memory-mapped.

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

A field of a pair, such as the weights of the loss, has a number for each token. It is a second pair of the same format,
cut into the same documents. Its numbers are fp32, or another numeric type that another program wrote. Field ``labels``
holds int32 ids: what is to be predicted at the place of each token. It is there only where one differs from its token.

A pair is named by the path of its ``.bin``. What belongs to it has another ending there: ``.idx``, ``.meta.json``, and
``.weights.bin`` for the pair of a field. ``data.tokens.pairs`` writes them.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray, blocks
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
"""All types by code, for numbers that belong to tokens."""
WEIGHTS, LABELS = OWN_FIELDS


def field_dtype(name: str) -> np.dtype:
    """Return the type in which the numbers of a field are kept."""
    return np.dtype("<i4") if name == LABELS else np.dtype("<f4")


def without_field(name: str, tokens: NDArray) -> NDArray:
    """``[T]`` what field ``name`` of ``OWN_FIELDS`` is for ``tokens [T]`` that do not have it: weight 1, own label."""
    assert name in OWN_FIELDS, f"{name} has no default"
    return tokens.astype(field_dtype(name)) if name == LABELS else np.ones(len(tokens), field_dtype(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIndex:
    """The content of an ``.idx``, memory-mapped where documents are sequences. Shape letter: D documents."""

    dtype: np.dtype
    num_tokens: int
    pointers: IntArray  # [D] byte at which each document starts in .bin
    document_lengths: NDArray[np.integer]  # [D] tokens of each

    @property
    def num_documents(self) -> int:
        return len(self.document_lengths)


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
    """By name, a number for each token (``data.tokens.indexed``)."""

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
            if not np.array_equal(own.document_lengths, index.document_lengths):
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


def index_bytes(dtype: np.dtype, lengths: NDArray[np.int32]) -> bytes:
    """The content of an ``.idx`` of documents that are one sequence each. ``lengths [D]``: their tokens."""
    pointers = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1], out=pointers[1:], dtype=np.int64)
    code = next(code for code, known in NUMBER_DTYPES.items() if known == dtype)
    bounds = np.arange(len(lengths) + 1, dtype="<i8")
    header = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(bounds))
    return b"".join((header, lengths.tobytes(), (pointers * dtype.itemsize).tobytes(), bounds.tobytes()))


def read_index(path: Path, dtypes: Mapping[int, np.dtype] = TOKEN_DTYPES) -> TokenIndex:
    """Read and check an ``.idx``. ``dtypes``: the types that it may have, by code.

    Raises ``DataError`` if the file is missing, is not a Megatron index, or contradicts itself.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.ENXIO, "it is no regular file")
        # Mapped: what is not as large as its header says is not read.
        content = np.asarray(np.memmap(path, np.uint8, "r")) if path.stat().st_size else np.zeros(0, np.uint8)
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
    lengths, pointers, bounds = (array.view(kind) for array, kind in zip(arrays, ("<i4", "<i8", "<i8"), strict=False))
    num_tokens = 0
    for block in blocks(num_sequences):
        ends = num_tokens + np.cumsum(lengths[block], dtype=np.int64)
        if (lengths[block] < 0).any() or not np.array_equal(pointers[block], (ends - lengths[block]) * dtype.itemsize):
            raise _broken(path, "its sequences do not follow each other without gaps")
        num_tokens = int(ends[-1])
    plain, is_rising = num_bounds == num_sequences + 1, True
    for block in blocks(num_bounds - 1):
        counts = np.diff(bounds[block.start : block.stop + 1])
        plain, is_rising = plain and bool((counts == 1).all()), is_rising and bool((counts >= 0).all())
    if bounds[0] != 0 or bounds[-1] != num_sequences or not is_rising:
        raise _broken(path, f"its documents do not divide its {num_sequences} sequences")
    if not plain:  # documents of several sequences, or of none
        ends = np.concatenate([pointers, [num_tokens * dtype.itemsize]])[bounds]
        pointers, lengths = ends[:-1], np.diff(ends) // dtype.itemsize
    return TokenIndex(dtype=dtype, num_tokens=num_tokens, pointers=pointers, document_lengths=lengths)


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


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the integer type that Megatron uses for this vocabulary size: uint16 below 65500 ids, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")
