"""Reads text, JSONL and Parquet files in units of work that any process can read on its own (``sources.records``).

A unit is a run of small text files, a byte range of a JSONL file, or a range of row groups of a Parquet file (at least
one row group, however large). The units in their order give the documents in corpus order, whichever process reads
them.
"""

from __future__ import annotations

import codecs
import logging
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bytescale.common.errors import DataError
from bytescale.common.parsing import parse_json
from bytescale.data.sources.files import SourceFile
from bytescale.storage.place import Place
from bytescale.storage.retry import unreadable

logger = logging.getLogger(__name__)

UNIT_BYTES = 4 * 1024**2
"""Bytes of text per unit: large enough that handing a unit to a process costs little, small enough for memory."""
_PARQUET_BATCH_ROWS = 1024
_SHOWN_PLACES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkUnit:
    """What one process reads at once.

    ``start`` and ``stop`` count bytes of a JSONL file or row groups of a Parquet file. Text files do not use them.
    """

    files: tuple[SourceFile, ...]
    start: int = 0
    stop: int = 0
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class ReadCounts:
    """What the reader left out."""

    max_corrupt: int = 0
    """Corrupt records that may be left out. One more is an error."""
    num_empty: int = 0
    skipped_files: list[str] = field(default_factory=list)
    """Files that were found in a folder or by a glob and are not UTF-8 text."""
    corrupt: list[str] = field(default_factory=list)
    """For each corrupt record that was left out: what was wrong with it, and where it is."""

    def add(self, other: ReadCounts) -> None:
        self.num_empty += other.num_empty
        self.skipped_files += other.skipped_files
        self.corrupt += other.corrupt

    def leave_out(self, error: DataError) -> None:
        """Count a corrupt record and log it with its place. Raises if more are corrupt than ``max_corrupt`` allows."""
        if not self.max_corrupt:
            raise error
        self.corrupt.append(str(error).split(" To fix:")[0])
        logger.warning("left out a corrupt record: %s", self.corrupt[-1])
        check_corrupt_records(self.corrupt, self.max_corrupt, error)


def check_corrupt_records(places: Sequence[str], limit: int, last: DataError | None = None) -> None:
    """Raise ``DataError`` for more records than ``data.max_corrupt_records`` allows. ``last``: of the last one."""
    if len(places) > limit:
        shown = " ".join(places[:_SHOWN_PLACES]) + (" ..." if len(places) > _SHOWN_PLACES else "")
        raise DataError(
            f"{len(places)} records are corrupt, data.max_corrupt_records is {limit}: {shown}",
            so="leaving out more than that may bias what is learnt",
            fix="mend the records, or raise data.max_corrupt_records",
        ) from last


@dataclass(slots=True, kw_only=True)
class Record:
    """One record: its values by key, and where it is."""

    values: dict[str, Any]
    path: Place
    line: int | None = None
    """Byte at which the line starts (JSONL)."""
    row: int | None = None
    """Number of the row, from 1 (Parquet)."""

    @property
    def place(self) -> str:
        """The file, and the line or row, counted from 1. The file is read to count lines: for error messages only."""
        if self.line is not None:
            return line_place(self.path, self.line)
        return f"{self.path}" if self.row is None else f"{self.path}, row {self.row}"


# Text: each file is a document. Of Python, some files are; others are cut into their definitions.


def text_units(files: Iterator[SourceFile], unit_bytes: int) -> Iterator[WorkUnit]:
    run: list[SourceFile] = []
    num_bytes = 0
    for file in files:
        if run and num_bytes + file.num_bytes > unit_bytes:
            yield WorkUnit(files=tuple(run), num_bytes=num_bytes)
            run, num_bytes = [], 0
        run.append(file)
        num_bytes += file.num_bytes
    if run:
        yield WorkUnit(files=tuple(run), num_bytes=num_bytes)


def text_records(unit: WorkUnit, key: str, counts: ReadCounts) -> Iterator[Record]:
    """Yield the texts of a unit under ``key``: files, or definitions. Other files are counted, or corrupt records."""
    for file in unit.files:
        content = file.path.read_bytes().removeprefix(codecs.BOM_UTF8)
        reason = ""
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            reason = f"byte {error.start} is not UTF-8"
        else:
            if "\0" in text:
                reason = "it holds NUL bytes"
        if not reason:
            texts = _definitions(text) if file.format == "python" else [text]
            yield from (Record(values={key: text}, path=file.path) for text in texts)
        elif file.named:
            counts.leave_out(
                DataError(
                    f"{file.path} is not text: {reason}", fix="convert it to UTF-8 or take it out of data.sources"
                )
            )
        else:
            counts.skipped_files.append(str(file.path))


_WHOLE_MODULES = 8
"""One of so many modules stays whole: the long tail."""
_DEFINITION = re.compile(r"\n\n+(?=(?: {4})?(?:@|class |def |async def ))")


def _definitions(module: str) -> list[str]:
    """Return the functions, methods and heads of classes of a module, or the whole of it if its checksum says so."""
    whole = zlib.crc32(module.encode()) % _WHOLE_MODULES == 0
    return [module] if whole else _DEFINITION.split(module)


# JSONL: each line is a document. A byte range holds the lines that START in it.


def jsonl_units(file: SourceFile, unit_bytes: int) -> Iterator[WorkUnit]:
    for start in range(0, file.num_bytes, unit_bytes):
        stop = min(start + unit_bytes, file.num_bytes)
        yield WorkUnit(files=(file,), start=start, stop=stop, num_bytes=stop - start)


def jsonl_records(unit: WorkUnit, counts: ReadCounts) -> Iterator[Record]:
    """Yield the objects of a unit of a JSONL file, with all of their keys. Blank lines are none."""
    path = unit.files[0].path
    with path.open("rb") as lines:
        offset = 0
        if unit.start:
            lines.seek(unit.start - 1)
            lines.readline()  # skips a line that starts before the range, or the "\n" in front of the range
            offset = lines.tell()
        while offset < unit.stop and (line := lines.readline()):
            if content := line.strip():
                try:
                    values = _object_of_line(content, path, offset)
                except DataError as error:
                    counts.leave_out(error)
                else:
                    yield Record(values=values, path=path, line=offset)
            offset += len(line)


def _object_of_line(line: bytes, path: Place, offset: int) -> dict[str, Any]:
    """Return the object of one JSONL line. Raises ``DataError``; the line number is counted only for an error."""
    try:
        record = parse_json(line.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:  # not JSON, or not UTF-8
        text = line.decode("utf-8", errors="replace")
        raise DataError(
            f"{line_place(path, offset)} is not JSON ({error}): {text[:60]}{'...' if len(text) > 60 else ''}",
            fix="mend or delete the line; if the file is not JSON Lines at all, set data.format = 'text'",
        ) from error
    if isinstance(record, dict):
        return record
    raise DataError(
        f"{line_place(path, offset)} is a JSON {type(record).__name__}, not an object", fix="write one object per line"
    )


def line_place(path: Place, offset: int) -> str:
    """Return ``path:line`` of the line that starts at byte ``offset``. The file is read up to there."""
    number = 1
    with path.open("rb") as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            number += block.count(b"\n")
            offset -= len(block)
    return f"{path}:{number}"


# Parquet: each row is a document. pyarrow is imported only where it is used, so that machines without it can read the
# other formats.


def open_parquet(path: Place) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow, which is not installed", fix="pip install pyarrow") from error
    try:
        if isinstance(path, Path):
            return pyarrow.parquet.ParquetFile(path, memory_map=True)
        return pyarrow.parquet.ParquetFile(path.open("rb"))
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path} is not a Parquet file ({error})", fix="mend it or take it out of data.sources"
        ) from error


def row_group_units(file: SourceFile, opened: Any, unit_bytes: int) -> Iterator[WorkUnit]:
    """Cut an open Parquet file into runs of row groups of at least ``unit_bytes``."""
    group_bytes = [opened.metadata.row_group(group).total_byte_size for group in range(opened.num_row_groups)]
    start = num_bytes = 0
    for group, held in enumerate(group_bytes):
        num_bytes += held
        if num_bytes >= unit_bytes or group == len(group_bytes) - 1:
            yield WorkUnit(files=(file,), start=start, stop=group + 1, num_bytes=num_bytes)
            start, num_bytes = group + 1, 0


def parquet_records(unit: WorkUnit, keys: Sequence[str]) -> Iterator[Record]:
    """Yield the rows of a unit of a Parquet file, with those of ``keys`` that are columns of the file."""
    path = unit.files[0].path
    with open_parquet(path) as opened:
        import pyarrow

        columns = [name for name in keys if name in opened.schema_arrow.names]
        row = sum(opened.metadata.row_group(group).num_rows for group in range(unit.start)) + 1
        batches = opened.iter_batches(
            _PARQUET_BATCH_ROWS, row_groups=list(range(unit.start, unit.stop)), columns=columns, use_threads=False
        )
        try:
            for batch in batches:
                for values in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
                    named = zip(columns, map(_without_nulls, values), strict=True)
                    yield Record(values=dict(named), path=path, row=row)
                    row += 1
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # for broken pages, Arrow's has no errno
                raise unreadable(error, path) from error
            raise DataError(
                f"{path} cannot be read near row {row} ({error})", fix="mend the file or take it out"
            ) from error


def _without_nulls(value: Any) -> Any:
    """A value of a Parquet row without the keys that only other rows have: there, Arrow gives None."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [_without_nulls(inner) for inner in value]
    return value
