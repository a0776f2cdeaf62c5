"""Reads the documents of text, JSONL and Parquet files, in units of work that any process can read on its own.

A unit is a run of small text files, a byte range of a JSONL file, or a range of row groups of a Parquet file (at least
one row group, however large). The units in their order give the documents in corpus order, whichever process reads
them.
"""

from __future__ import annotations

import codecs
import difflib
import itertools
import logging
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bytescale.common.errors import DataError, problem
from bytescale.common.parsing import parse_json
from bytescale.data.sources.source_file import SourceFile
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text and its place: the file, and the byte (JSONL) or the row (Parquet) at which the text starts."""

    text: str
    place: str


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

    def leave_out(self, error: DataError) -> None:
        """Count a corrupt record and log it with its place. Raises if more are corrupt than ``max_corrupt`` allows.

        If none may be left out, ``error`` itself is raised.
        """
        if not self.max_corrupt:
            raise error
        self.corrupt.append(str(error).split(" To fix:")[0])
        logger.warning("left out a corrupt record: %s", self.corrupt[-1])
        if len(self.corrupt) > self.max_corrupt:
            raise too_many_corrupt_records(len(self.corrupt), self.corrupt, self.max_corrupt) from error


def too_many_corrupt_records(number: int, places: Sequence[str], limit: int) -> DataError:
    """Return the error for a corpus with more corrupt records than ``data.max_corrupt_records`` allows."""
    shown = " ".join(places[:_SHOWN_PLACES]) + (" ..." if number > _SHOWN_PLACES else "")
    return DataError(
        problem(
            f"{number} records are corrupt, data.max_corrupt_records is {limit}: {shown}",
            so="leaving out more than that may bias what is learnt",
            fix="mend the records, or raise data.max_corrupt_records",
        )
    )


def plan_units(files: Sequence[SourceFile], text_key: str, unit_bytes: int = UNIT_BYTES) -> list[WorkUnit]:
    """Cut text, JSONL and Parquet files into units, in corpus order.

    The footer of each Parquet file is read, so that a missing column is found before any work is done.

    Raises:
        DataError: a Parquet file is broken or has no text column ``text_key``.
    """
    units: list[WorkUnit] = []
    try:
        for file_format, run in itertools.groupby(files, key=lambda file: file.format):
            if file_format in ("text", "python"):
                units.extend(_text_units(run, unit_bytes))
            elif file_format == "jsonl":
                units.extend(unit for file in run for unit in jsonl_units(file, unit_bytes))
            elif file_format == "parquet":
                units.extend(unit for file in run for unit in _parquet_units(file, text_key, unit_bytes))
            else:
                raise AssertionError(f"files of format {file_format!r} hold tokens, not text")
    except OSError as error:
        raise unreadable(error, "a source") from error
    return units


def iter_documents(unit: WorkUnit, text_key: str, counts: ReadCounts) -> Iterator[Document]:
    """Yield the documents of one unit. Empty documents and files that are not text are only counted in ``counts``.

    Raises:
        DataError: a line is not JSON or has no string under ``text_key``, or a file has vanished or is broken. The
            message names the file and the line or row (counted from 1).
    """
    try:
        match unit.files[0].format:
            case "text" | "python":
                documents = _text_documents(unit, counts)
            case "jsonl":
                documents = _jsonl_documents(unit, text_key, counts)
            case _:
                documents = _parquet_documents(unit, text_key)
        for document in documents:
            if document.text:
                yield document
            else:
                counts.num_empty += 1
    except OSError as error:
        raise unreadable(error, unit.files[0].path) from error


# Text: each file is a document. Of Python, some files are; others are cut into their definitions.


def _text_units(files: Iterator[SourceFile], unit_bytes: int) -> Iterator[WorkUnit]:
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


def _text_documents(unit: WorkUnit, counts: ReadCounts) -> Iterator[Document]:
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
            yield from (Document(text=text, place=str(file.path)) for text in texts)
        elif file.named:
            counts.leave_out(
                DataError(
                    problem(
                        f"{file.path} is not text: {reason}", fix="convert it to UTF-8 or take it out of data.sources"
                    )
                )
            )
        else:
            counts.skipped_files.append(str(file.path))


_WHOLE_MODULES = 8
"""One of so many modules stays whole: the long tail."""
_DEFINITION = re.compile(r"\n\n+(?=(?: {4})?(?:@|class |def |async def ))")


def _definitions(module: str) -> list[str]:
    """Return the functions, methods and heads of classes of a module, or the whole of it if its checksum says so.

    Most of the standard library's functions have less than 1K tokens, and a few modules have tens of thousands.
    """
    whole = zlib.crc32(module.encode()) % _WHOLE_MODULES == 0
    return [module] if whole else _DEFINITION.split(module)


# JSONL: each line is a document. A byte range holds the lines that START in it.


def jsonl_units(file: SourceFile, unit_bytes: int) -> Iterator[WorkUnit]:
    for start in range(0, file.num_bytes, unit_bytes):
        stop = min(start + unit_bytes, file.num_bytes)
        yield WorkUnit(files=(file,), start=start, stop=stop, num_bytes=stop - start)


def _jsonl_documents(unit: WorkUnit, text_key: str, counts: ReadCounts) -> Iterator[Document]:
    path = unit.files[0].path
    for offset, line in jsonl_lines(unit):
        try:
            text = _text_of_line(line, text_key, path, offset)
        except DataError as error:
            counts.leave_out(error)
        else:
            yield Document(text=text, place=f"{path}, byte {offset}")


def jsonl_lines(unit: WorkUnit) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a unit of a JSONL file that are not blank, each with the byte at which it starts."""
    with unit.files[0].path.open("rb") as lines:
        offset = 0
        if unit.start:
            lines.seek(unit.start - 1)
            lines.readline()  # skips a line that starts before the range, or the "\n" in front of the range
            offset = lines.tell()
        while offset < unit.stop and (line := lines.readline()):
            if content := line.strip():
                yield offset, content
            offset += len(line)


def object_of_line(line: bytes, path: Place, offset: int) -> dict[str, Any]:
    """Return the object of one JSONL line. Raises ``DataError``; the line number is counted only for an error."""
    try:
        record = parse_json(line.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:  # not JSON, or not UTF-8
        raise DataError(
            problem(
                f"{line_place(path, offset)} is not JSON ({error}): {_excerpt(line)}",
                fix="mend or delete the line; if the file is not JSON Lines at all, set data.format = 'text'",
            )
        ) from error
    if isinstance(record, dict):
        return record
    raise DataError(
        problem(
            f"{line_place(path, offset)} is a JSON {type(record).__name__}, not an object",
            fix="write one object per line",
        )
    )


def _text_of_line(line: bytes, text_key: str, path: Place, offset: int) -> str:
    """Return the text of one JSONL line. ``null`` counts as empty."""
    record = object_of_line(line, path, offset)
    text = record.get(text_key, _MISSING)
    if text is None or (isinstance(text, str) and _is_unicode(text)):
        return text or ""
    place = line_place(path, offset)
    if isinstance(text, str):
        raise DataError(problem(f"{place}: {text_key!r} holds half a surrogate pair (\\ud8..)", fix="mend the line"))
    if text is _MISSING:
        raise DataError(problem(f"{place} has no key {text_key!r}", fix=_key_hint(text_key, record)))
    raise DataError(
        problem(
            f"{place}: {text_key!r} is a JSON {type(text).__name__}, not a string",
            fix="mend the line or set data.text_key to the key that holds the text",
        )
    )


_MISSING = object()


def _is_unicode(text: str) -> bool:
    """Return whether ``text`` has a UTF-8 form. JSON escapes can spell halves of surrogate pairs, which have none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def line_place(path: Place, offset: int) -> str:
    """Return ``path:line`` of the line that starts at byte ``offset``. The file is read up to there."""
    number = 1
    with path.open("rb") as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            number += block.count(b"\n")
            offset -= len(block)
    return f"{path}:{number}"


def _excerpt(line: bytes, length: int = 60) -> str:
    text = line.decode("utf-8", errors="replace")
    return text if len(text) <= length else text[:length] + "..."


def _key_hint(text_key: str, known: Sequence[str] | dict[str, Any]) -> str:
    close = difflib.get_close_matches(text_key, list(known), n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    for content, key in (("messages", "messages"), ("prompt", "completion"), ("tokens", "tokens")):
        if key in known:
            hint = f"set data.content = {content!r} for records with {key!r}. "
    return f"{hint}Set data.text_key to one of {', '.join(sorted(known)) or '(nothing: there are no keys)'}"


# Parquet: each row is a document. pyarrow is imported only where it is used, so that machines without it can read the
# other formats.


def open_parquet(path: Place) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(problem(f"{path} needs pyarrow, which is not installed", fix="pip install pyarrow")) from error
    try:
        if isinstance(path, Path):
            return pyarrow.parquet.ParquetFile(path, memory_map=True)
        return pyarrow.parquet.ParquetFile(path.open("rb"))
    except pyarrow.ArrowException as error:
        raise DataError(
            problem(f"{path} is not a Parquet file ({error})", fix="mend it or take it out of data.sources")
        ) from error


def _parquet_units(file: SourceFile, text_key: str, unit_bytes: int) -> Iterator[WorkUnit]:
    with open_parquet(file.path) as opened:
        _check_text_column(opened, text_key, file.path)
        yield from row_group_units(file, opened, unit_bytes)


def row_group_units(file: SourceFile, opened: Any, unit_bytes: int) -> Iterator[WorkUnit]:
    """Cut an open Parquet file into runs of row groups of at least ``unit_bytes``."""
    group_bytes = [opened.metadata.row_group(group).total_byte_size for group in range(opened.num_row_groups)]
    start = num_bytes = 0
    for group, held in enumerate(group_bytes):
        num_bytes += held
        if num_bytes >= unit_bytes or group == len(group_bytes) - 1:
            yield WorkUnit(files=(file,), start=start, stop=group + 1, num_bytes=num_bytes)
            start, num_bytes = group + 1, 0


def _check_text_column(opened: Any, text_key: str, path: Place) -> None:
    import pyarrow.types

    schema = opened.schema_arrow
    if text_key not in schema.names:
        raise DataError(problem(f"{path} has no column {text_key!r}", fix=_key_hint(text_key, schema.names)))
    kind = schema.field(text_key).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind)):
        raise DataError(
            problem(
                f"{path}: column {text_key!r} is of type {kind}, not string",
                fix="set data.text_key to the column that holds the text",
            )
        )


def _parquet_documents(unit: WorkUnit, text_key: str) -> Iterator[Document]:
    path = unit.files[0].path
    for row, (text,) in parquet_rows(unit, [text_key]):
        yield Document(text=text or "", place=f"{path}, row {row}")


def parquet_rows(unit: WorkUnit, columns: list[str]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield the rows of a unit of a Parquet file: the number of the row, from 1, and its values of ``columns``."""
    path = unit.files[0].path
    with open_parquet(path) as opened:
        import pyarrow

        row = sum(opened.metadata.row_group(group).num_rows for group in range(unit.start)) + 1
        batches = opened.iter_batches(
            _PARQUET_BATCH_ROWS, row_groups=list(range(unit.start, unit.stop)), columns=columns, use_threads=False
        )
        try:
            for batch in batches:
                for values in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
                    yield row, values
                    row += 1
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # for broken pages, Arrow's has no errno
                raise unreadable(error, path) from error
            raise DataError(
                problem(f"{path} cannot be read near row {row} ({error})", fix="mend the file or take it out")
            ) from error
