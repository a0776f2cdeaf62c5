"""Reads the records of fine-tuning data: JSONL lines or Parquet rows with several keys, one record a document.

``data.content`` says what the records are (``RecordKind``). ``data.tokens.examples`` turns them into tokens.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bytescale.common.errors import ConfigError, DataError, problem
from bytescale.data.sources.readers import (
    UNIT_BYTES,
    ReadCounts,
    WorkUnit,
    jsonl_lines,
    jsonl_units,
    line_place,
    object_of_line,
    open_parquet,
    parquet_rows,
    row_group_units,
)
from bytescale.data.sources.source_file import SourceFile
from bytescale.storage.place import Place
from bytescale.storage.retry import unreadable


@dataclass(frozen=True, slots=True)
class RecordKind:
    """Which keys the records of a corpus have."""

    content: str
    """The value of ``data.content``."""
    required: tuple[tuple[str, ...], ...]
    """Of each tuple, a record has exactly one key."""
    optional: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    """Those of the required keys that ``data.fields`` names."""

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that are read."""
        return tuple(itertools.chain(*self.required, self.optional))


MESSAGES = RecordKind("messages", (("messages",),), ("tools",))
PROMPT = RecordKind("prompt", (("prompt",), ("completion",)))
TOKENS = RecordKind("tokens", (("tokens", "input_ids"),), ("labels", "weights"))


def kind_of(content: str, fields: Sequence[str]) -> RecordKind:
    """Return the kind of ``data.content``; records of tokens must also have the keys ``fields``."""
    if content == TOKENS.content:
        return RecordKind(content, (*TOKENS.required, *((name,) for name in fields)), TOKENS.optional, tuple(fields))
    return MESSAGES if content == MESSAGES.content else PROMPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record: its values by key (a key without a value is left out), and where it is."""

    values: dict[str, Any]
    path: Place
    at: int
    """Byte at which the line starts (JSONL), or the number of the row, from 1 (Parquet)."""
    is_row: bool = False

    @property
    def place(self) -> str:
        """The file, and the line or row, counted from 1. The file is read to count lines: for error messages only."""
        return f"{self.path}, row {self.at}" if self.is_row else line_place(self.path, self.at)


def plan_record_units(files: Sequence[SourceFile], kind: RecordKind, unit_bytes: int = UNIT_BYTES) -> list[WorkUnit]:
    """Cut JSONL and Parquet files into units, in corpus order, as ``readers.plan_units`` cuts text.

    Raises:
        ConfigError: a file is of another format.
        DataError: a Parquet file is broken or lacks a column.
    """
    units: list[WorkUnit] = []
    try:
        for file in files:
            if file.format == "jsonl":
                units.extend(jsonl_units(file, unit_bytes))
            elif file.format == "parquet":
                with open_parquet(file.path) as opened:
                    _check_keys(opened.schema_arrow.names, kind, str(file.path), "column")
                    units.extend(row_group_units(file, opened, unit_bytes))
            else:
                raise ConfigError(
                    problem(
                        f"{file.path} is text, but data.content is {kind.content!r}",
                        so="text has no records with the keys that are needed",
                        fix="use JSONL or Parquet files (data.format names the format of files with other endings), or "
                        "data.content = 'text'",
                    )
                )
    except OSError as error:
        raise unreadable(error, "a source") from error
    return units


def iter_records(unit: WorkUnit, kind: RecordKind, counts: ReadCounts) -> Iterator[Record]:
    """Yield the records of one unit.

    Raises ``DataError`` with file and line or row for a line that is not JSON or lacks a key, beyond those that
    ``counts`` allows to leave out.
    """
    path = unit.files[0].path
    try:
        if unit.files[0].format == "parquet":
            with open_parquet(path) as opened:
                columns = [name for name in kind.keys if name in opened.schema_arrow.names]
            for row, values in parquet_rows(unit, columns):
                named = {name: _without_nulls(value) for name, value in zip(columns, values, strict=True)}
                record = Record(values=_present(named), path=path, at=row, is_row=True)
                yield from _checked(record, kind, counts)
            return
        for offset, line in jsonl_lines(unit):
            try:
                content = object_of_line(line, path, offset)
            except DataError as error:
                counts.leave_out(error)
                continue
            named = {name: content[name] for name in kind.keys if name in content}
            yield from _checked(Record(values=_present(named), path=path, at=offset), kind, counts, known=list(content))
    except OSError as error:
        raise unreadable(error, path) from error


def _checked(record: Record, kind: RecordKind, counts: ReadCounts, known: Sequence[str] = ()) -> Iterator[Record]:
    try:
        if any(sum(name in record.values for name in names) != 1 for names in kind.required):
            _check_keys([name for name in known if name not in kind.keys] + [*record.values], kind, record.place, "key")
    except DataError as error:
        counts.leave_out(error)
    else:
        yield record


def _check_keys(known: Sequence[str], kind: RecordKind, place: str, word: str) -> None:
    """Raise ``DataError`` unless ``known`` has exactly one name of each of ``kind.required``."""
    for names in kind.required:
        held = [name for name in names if name in known]
        if len(held) == 1:
            continue
        if held:
            raise DataError(
                problem(
                    f"{place} has the {word}s {' and '.join(map(repr, held))}",
                    so="which of them holds its tokens cannot be told",
                    fix="leave one of them out",
                )
            )
        if names[0] in kind.fields:
            raise DataError(
                problem(
                    f"{place} has no {word} {names[0]!r}, which data.fields names",
                    so="its tokens would lack it",
                    fix="write a number per token, or leave the field out",
                )
            )
        close = difflib.get_close_matches(names[0], known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise DataError(
            problem(
                f"{place} has no {word} {' or '.join(map(repr, names))}, which data.content = {kind.content!r} needs",
                fix=f"{hint}it has {', '.join(sorted(known)) or 'none at all'}; data.content is one of text, messages, "
                "prompt and tokens",
            )
        )


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _without_nulls(value: Any) -> Any:
    """A value of a Parquet row without the keys that only other rows have: there, Arrow gives None."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [_without_nulls(inner) for inner in value]
    return value
