"""Reads the rows of Parquet files in little memory. pyarrow is imported only where it is used: importing it takes long.

A row group may be large, because its pages are read one by one. A page is in memory as a whole, so files with far too
large ones are refused; how large they are is in their headers alone, which are read before (``_largest_pages``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from bytescale.common.errors import DataError
from bytescale.storage.place import Place
from bytescale.storage.retry import unreadable

MOST_RECORD_BYTES = 64 * 2**20
"""Of a text file, a line or a row: some 16M tokens. What Python makes of it may take 20 times as much."""
MOST_PAGE_BYTES = 512 * 2**20
"""Uncompressed bytes of the pages that are in memory at once: one of each column that is read, and its dictionary."""
_BATCH_ROWS = 1024
_BATCH_BYTES = 16 * 2**20
"""So many rows are Python objects at once, or fewer, where rows are large."""
_FIRST_ROWS = 8
_DICTIONARY = 2  # kind of a page
_WHOLE, _BINARY, _STRUCT, _FIXED = (4, 5, 6), 8, 12, {1: 0, 2: 0, 3: 1, 7: 8}  # kinds of Thrift's fields, and bytes


def open_parquet(path: Place) -> Any:
    """The open file. Raises ``DataError`` unless it is of Parquet."""
    import pyarrow
    import pyarrow.parquet

    try:
        # The buffer makes pages stream: without it, whole columns of a row group are in memory.
        return pyarrow.parquet.ParquetFile(path if isinstance(path, Path) else path.open(), buffer_size=1 << 20)
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path} is not a Parquet file ({error})", fix="mend it or take it out of data.sources"
        ) from error


def rows_of(path: Place, start: int, stop: int, keys: Sequence[str]) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number of each row of some row groups, from 1, and its values; None for a huge row.

    ``keys``: columns that are read, where the file has them. Raises ``DataError`` for what cannot be read.
    """
    with open_parquet(path) as opened:
        import pyarrow

        columns = [name for name in keys if name in opened.schema_arrow.names]
        groups = [opened.metadata.row_group(group) for group in range(stop)]
        row, num_rows = (sum(group.num_rows for group in own) for own in (groups[:start], groups[start:]))
        _check_pages(path, groups[start:], columns)
        read = partial(opened.iter_batches, row_groups=list(range(start, stop)), columns=columns, use_threads=False)
        try:
            # As many rows at once as promise to be a few MiB: a row may have one word, or a whole book.
            first = next(read(_FIRST_ROWS), None)
            row_bytes = sum(group.total_byte_size for group in groups[start:]) // max(1, num_rows)
            row_bytes = max(1, row_bytes, 0 if first is None else first.nbytes // max(1, len(first)))
            for batch in read(max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))):
                is_large = batch.nbytes > MOST_RECORD_BYTES
                for part in (batch.slice(number, 1) for number in range(len(batch))) if is_large else (batch,):
                    for values in [None] if part.nbytes > MOST_RECORD_BYTES else part.to_pylist():
                        row += 1
                        yield row, values
        except (pyarrow.ArrowException, ValueError, OverflowError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # for broken pages, Arrow's has no errno
                raise unreadable(error, path) from error
            raise DataError(
                f"{path} cannot be read near row {row + 1} ({error})", fix="mend the file or take it out"
            ) from error
        finally:
            pyarrow.default_memory_pool().release_unused()  # it would keep what the largest page took


def _check_pages(path: Place, groups: Sequence[Any], columns: Sequence[str]) -> None:
    """Raise ``DataError`` for too large pages of ``columns``. Behind a URL, only of large groups."""
    for group in groups:
        if isinstance(path, Path) or group.total_byte_size > MOST_PAGE_BYTES:
            chunks = [group.column(number) for number in range(group.num_columns)]
            own = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
            with path.open("rb") as file:
                num_bytes = sum(_largest_pages(file, chunk) for chunk in own)
            if num_bytes > MOST_PAGE_BYTES:
                raise DataError(
                    f"{path} has pages of {num_bytes} bytes",
                    so=f"they would be in memory as a whole, and more than {MOST_PAGE_BYTES} bytes are too many",
                    fix="write it again with smaller pages (pyarrow.parquet.write_table(..., write_batch_size=16, "
                    "use_dictionary=False))",
                )


def _largest_pages(file: IO[bytes], chunk: Any) -> int:
    """Uncompressed bytes of the dictionary and the largest page of a column's chunk, by the headers of its pages."""
    place = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)), default=0)
    stop, largest = place + chunk.total_compressed_size, [0, 0]
    with suppress(IndexError):  # a header that is cut off or none, over which Arrow will stumble, too
        while place < stop:
            file.seek(place)
            header = _fields(file)
            kind, unpacked, packed = (header.get(number, 0) for number in (1, 2, 3))
            largest[kind == _DICTIONARY] = max(largest[kind == _DICTIONARY], unpacked)
            place = file.tell() + max(1, packed)
    return sum(largest)


def _fields(file: IO[bytes]) -> dict[int, int]:
    """Read a struct of Thrift's compact protocol. Returns the whole numbers among its fields."""
    found, number = dict[int, int](), 0
    while head := file.read(1)[0]:
        number = number + (head >> 4) if head >> 4 else _number(file) // 2
        if (kind := head & 15) in _WHOLE:
            value = _number(file)
            found[number] = value >> 1 ^ -(value & 1)
        elif kind == _STRUCT:
            _fields(file)
        elif kind == _BINARY or kind in _FIXED:
            file.seek(_number(file) if kind == _BINARY else _FIXED[kind], 1)
        else:
            raise IndexError("headers of pages have no other kinds of fields")
    return found


def _number(file: IO[bytes]) -> int:
    value = shift = 0
    while (byte := file.read(1)[0]) >= 128 and shift < 64:
        value, shift = value | (byte & 127) << shift, shift + 7
    return value | byte << shift
