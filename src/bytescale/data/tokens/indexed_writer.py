"""Writes Megatron's ``.bin/.idx`` pair (``data.tokens.indexed``). The pair appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.atomic import remove_stale_temporaries, temporary_path, write_atomically
from bytescale.common.errors import DataError, problem
from bytescale.data.tokens.indexed import HEADER, MAGIC, NUMBER_DTYPES, VERSION, facts_path, pair_paths

_MAX_LENGTH = np.iinfo(np.int32).max


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the integer type that Megatron uses for this vocabulary size: uint16 below 65500 ids, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedWriter:
    """Streams documents into ``prefix.bin`` and, at the end, ``prefix.idx``.

    Both files are written under temporary names. ``commit`` puts the ``.bin`` in place first and the ``.idx`` last,
    because no reader accepts a ``.bin`` without its ``.idx``. Leaving the ``with`` block without ``commit`` removes
    what was written. A process that is killed leaves hidden ``.tmp`` files, which the next writer of the same pair
    removes.
    """

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self._bin_path, self._idx_path = pair_paths(prefix)
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
                problem(f"{self._bin_path} cannot be written ({error})", fix="choose a folder that you may write to")
            ) from error

    def add_documents(self, tokens: NDArray, lengths: IntArray) -> None:
        """Append documents.

        Args:
            tokens: ``[sum of lengths]`` ids of all documents, each representable in the writer's type; of a field
                (``data.tokens.fields``) its numbers.
            lengths: ``[number of documents]`` tokens of each document.

        Raises:
            DataError: a document has more than 2^31 - 1 tokens, which the format cannot hold, or the disk is full.
        """
        assert len(tokens) == int(lengths.sum()), f"{len(tokens)} tokens for lengths that sum to {lengths.sum()}"
        if len(lengths) and lengths.max() > _MAX_LENGTH:
            raise DataError(
                problem(
                    f"a document of {lengths.max()} tokens is longer than the {_MAX_LENGTH} that .idx can hold",
                    fix="split it into several documents",
                )
            )
        try:
            self._file.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        except OSError as error:
            raise DataError(
                problem(f"{self._temporary} cannot be written ({error})", fix="make room or choose another folder")
            ) from error
        self._lengths.append(lengths.astype("<i4"))

    def commit(self, facts: bytes | None) -> None:
        """Make the pair appear under its names. It replaces an older pair. Nothing can be added afterwards.

        Args:
            facts: content of ``prefix.meta.json`` (``data.tokens.facts``), which is put in place before the ``.idx``.
                The pair of a field has none.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._idx_path.unlink(missing_ok=True)  # an old .idx must never stand beside the new .bin
        self._temporary.replace(self._bin_path)
        if facts is not None:
            write_atomically(facts_path(self._bin_path), facts)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)
