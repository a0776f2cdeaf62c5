"""Reads the records of a corpus: text files, JSONL lines or Parquet rows. A text is a record with a single key.

A unit of work is a run of small text files, a byte range of a JSONL file, or a range of row groups of a Parquet file
(at least one row group, however large). Any process can read a unit on its own. The units in their order give the
records in corpus order, whichever process reads them.

``data.content`` says what the records are (``RecordKind``). ``data.tokens.examples`` turns them into tokens.
"""

from __future__ import annotations

import codecs
import difflib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bytescale.common.errors import ConfigError, DataError
from bytescale.common.parsing import parse_json
from bytescale.config.schema import CorpusConfig
from bytescale.data.sources.files import SourceFile, definitions
from bytescale.data.sources.parquet import MOST_RECORD_BYTES, open_parquet, rows_of
from bytescale.storage.place import Place
from bytescale.storage.retry import unreadable

logger = logging.getLogger(__name__)

UNIT_BYTES = 4 * 1024**2
"""Bytes of text per unit: large enough that handing a unit to a process costs little, small enough for memory."""
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
    place: Callable[[], str]
    """Returns the file, and the line or row, counted from 1. It reads the file to count lines: for error messages."""
    path: Place | None = None
    """Of its file, for what it names beside it."""


@dataclass(frozen=True, slots=True)
class RecordKind:
    """Which keys the records of a corpus have."""

    content: str
    required: tuple[tuple[str, ...], ...]
    """Of each tuple, a record has exactly one key."""
    optional: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(itertools.chain(*self.required, self.optional))

    @property
    def is_text(self) -> bool:
        """Whether a record is one text, under the only key. Each text file is such a record."""
        return self.content == "text"


def kind_of(config: CorpusConfig) -> RecordKind:
    """Return the kind of ``data.content``; records of tokens must also have the keys ``data.fields``."""
    match config.content:
        case "text":
            return RecordKind("text", ((config.text_key,),))
        case "tokens":
            required = (("tokens", "input_ids"), *((name,) for name in config.fields))
            return RecordKind("tokens", required, ("labels", "weights"))
        case "messages":
            beside = ("tools", "chat_template_kwargs", "images", "videos")
            return RecordKind("messages", (("messages", "conversations"),), beside)
        case _:
            return RecordKind("prompt", (("prompt",), ("completion",)))


def plan_units(files: Sequence[SourceFile], kind: RecordKind, unit_bytes: int = UNIT_BYTES) -> list[WorkUnit]:
    """Cut text, JSONL and Parquet files into units, in corpus order.

    The footer of each Parquet file is read, so that a missing column is found before any work is done.

    Raises ``ConfigError`` if a file is text, but ``kind`` is not; ``DataError`` if a Parquet file is broken or lacks a
    column.
    """
    units: list[WorkUnit] = []
    try:
        for file_format, found in itertools.groupby(files, key=lambda file: file.format):
            run = list(found)
            match file_format:
                case "jsonl":
                    for file in run:
                        for start in range(0, file.num_bytes, unit_bytes):
                            stop = min(start + unit_bytes, file.num_bytes)
                            units.append(WorkUnit(files=(file,), start=start, stop=stop, num_bytes=stop - start))
                case "parquet":
                    for file in run:
                        with open_parquet(file.path) as opened:
                            _check_keys(opened.schema_arrow.names, kind, str(file.path), "column")
                            units.extend(row_group_units(file, opened, unit_bytes))
                case _:
                    if not kind.is_text:
                        raise ConfigError(
                            f"{run[0].path} is text, but data.content is {kind.content!r}",
                            so="text has no records with the keys that are needed",
                            fix="use JSONL or Parquet files (data.format names the format of files with other "
                            "endings), or data.content = 'text'",
                        )
                    units.extend(text_units(run, unit_bytes))
    except OSError as error:
        raise unreadable(error, "a source") from error
    return units


def iter_records(unit: WorkUnit, kind: RecordKind, counts: ReadCounts) -> Iterator[Record]:
    """Yield the records of one unit. Empty texts, and files that are not text, are only counted in ``counts``.

    Raises:
        DataError: a line is not JSON, a record lacks a key or its text is no string, beyond those that ``counts``
            allows to leave out; or a file has vanished or is broken. The message names the file, and the line or row.
    """
    path = unit.files[0].path
    try:
        match unit.files[0].format:
            case "text" | "python":
                records = text_records(unit, kind.keys[0], counts)
            case "jsonl":
                records = jsonl_records(unit, counts)
            case _:
                records = parquet_records(unit, kind.keys, counts)
        for record in records:
            try:
                record.values = _own_values(record, kind)
            except DataError as error:
                counts.leave_out(error)
                continue
            if kind.is_text and not record.values[kind.keys[0]]:
                counts.num_empty += 1
            else:
                yield record
    except OSError as error:
        raise unreadable(error, path) from error


def _own_values(record: Record, kind: RecordKind) -> dict[str, Any]:
    """Return the values of the keys of ``kind``. A null is an empty text, and else as if the key were missing.

    Raises ``DataError`` unless the record has its keys, and its text is one.
    """
    named = {name: record.values[name] for name in kind.keys if name in record.values}
    values = {name: value for name, value in named.items() if kind.is_text or value is not None}
    if any(sum(name in values for name in names) != 1 for names in kind.required):
        known = [name for name in record.values if name in values or name not in named]
        _check_keys(known, kind, record.place())
    if not kind.is_text:
        return values
    (key,) = kind.keys
    text = "" if values[key] is None else values[key]
    if not isinstance(text, str):
        raise DataError(
            f"{record.place()}: {key!r} is of type {type(text).__name__}, not a string",
            fix="mend the record or set data.text_key to the key that holds the text",
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON escapes can spell halves of surrogate pairs, which have no UTF-8 form
        raise DataError(
            f"{record.place()}: {key!r} holds half a surrogate pair (\\ud8..)", fix="mend the line"
        ) from error
    return {key: text}


def _check_keys(known: Sequence[str], kind: RecordKind, place: str, word: str = "key") -> None:
    """Raise ``DataError`` unless ``known`` has exactly one name of each of ``kind.required``."""
    for names in kind.required:
        held = [name for name in names if name in known]
        if len(held) == 1:
            continue
        if held:
            raise DataError(
                f"{place} has the {word}s {' and '.join(map(repr, held))}",
                so="which of them holds its tokens cannot be told",
                fix="leave one of them out",
            )
        close = difflib.get_close_matches(names[0], known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        held_names = ", ".join(sorted(known)) or "none at all"
        what = f"{place} has no {word} {' or '.join(map(repr, names))}"
        if kind.is_text:
            kinds = {"tokens": "tokens", "completion": "prompt", "messages": "messages", "conversations": "messages"}
            for key in (key for key in kinds if key in known):
                hint = f"set data.content = {kinds[key]!r} for records with {key!r}, or "
                break
            raise DataError(what, fix=f"{hint}set data.text_key to one of {held_names}")
        is_field = kind.content == "tokens" and len(names) == 1
        raise DataError(
            f"{what}, which {'data.fields names' if is_field else f'data.content = {kind.content!r} needs'}",
            fix=f"{hint}it has {held_names}; data.content is one of text, messages, prompt and tokens",
        )


# Text: each file is a document. Of Python, some files are; others are cut into their definitions.


def text_units(files: Sequence[SourceFile], unit_bytes: int) -> Iterator[WorkUnit]:
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
        place = partial(str, file.path)
        if file.num_bytes > MOST_RECORD_BYTES:
            counts.leave_out(_too_large(str(file.path)))
            continue
        try:
            text = file.path.read_bytes().removeprefix(codecs.BOM_UTF8).decode("utf-8")
            reason = "it holds NUL bytes" if "\0" in text else ""
        except UnicodeDecodeError as error:
            reason = f"byte {error.start} is not UTF-8"
        if not reason:
            texts = definitions(text) if file.format == "python" else [text]
            yield from (Record(values={key: text}, place=place) for text in texts)
        elif file.named:
            counts.leave_out(
                DataError(
                    f"{file.path} is not text: {reason}", fix="convert it to UTF-8 or take it out of data.sources"
                )
            )
        else:
            counts.skipped_files.append(str(file.path))


# JSONL: each line is a document. A byte range holds the lines that START in it.


def jsonl_records(unit: WorkUnit, counts: ReadCounts) -> Iterator[Record]:
    """Yield the objects of a unit of a JSONL file, with all of their keys. Blank lines are none."""
    path = unit.files[0].path
    with path.open("rb") as lines:
        offset = 0
        if unit.start:
            lines.seek(unit.start - 1)
            offset = _next_line(lines, unit.stop)  # behind a line before the range, or the "\n" in front of it
        while offset < unit.stop and (line := lines.readline(MOST_RECORD_BYTES + 1)):
            if len(line) > MOST_RECORD_BYTES:
                counts.leave_out(_too_large(line_place(path, offset)))
                offset = _next_line(lines, unit.stop)
                continue
            if content := line.strip():
                try:
                    values = _object_of_line(content, path, offset)
                except DataError as error:
                    counts.leave_out(error)
                else:
                    yield Record(values=values, place=partial(line_place, path, offset), path=path)
            offset += len(line)


def _next_line(lines: Any, stop: int) -> int:
    """Read up to the end of a line, or at least up to ``stop``. Returns the offset behind it."""
    while part := lines.readline(1 << 20):
        if part.endswith(b"\n") or lines.tell() >= stop:
            break
    return int(lines.tell())


def _too_large(place: str) -> DataError:
    return DataError(
        f"{place} has more than the {MOST_RECORD_BYTES} bytes that a record may have",
        so="it would take gigabytes of memory",
        fix="cut it into several documents, or let it be left out (data.max_corrupt_records)",
    )


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


# Parquet: each row is a document.


def row_group_units(file: SourceFile, opened: Any, unit_bytes: int) -> Iterator[WorkUnit]:
    """Cut an open Parquet file into runs of row groups of at least ``unit_bytes``."""
    group_bytes = [opened.metadata.row_group(group).total_byte_size for group in range(opened.num_row_groups)]
    start = num_bytes = 0
    for group, held in enumerate(group_bytes):
        num_bytes += held
        if num_bytes >= unit_bytes or group == len(group_bytes) - 1:
            yield WorkUnit(files=(file,), start=start, stop=group + 1, num_bytes=num_bytes)
            start, num_bytes = group + 1, 0


def parquet_records(unit: WorkUnit, keys: Sequence[str], counts: ReadCounts) -> Iterator[Record]:
    """Yield the rows of a unit of a Parquet file, with those of ``keys`` that are columns of the file."""
    path = unit.files[0].path
    for row, values in rows_of(path, unit.start, unit.stop, keys):
        place = partial("{}, row {}".format, path, row)
        if values is None:
            counts.leave_out(_too_large(place()))
        else:
            yield Record(values=values, place=place, path=path)
