"""Reads the records of a corpus: text files, JSONL lines or Parquet rows. A text is a record with a single key.

``data.content`` says what the records are (``RecordKind``). ``data.tokens.tokenize`` and ``data.tokens.examples`` turn
them into tokens.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bytescale.common.errors import ConfigError, DataError
from bytescale.data.sources.files import SourceFile
from bytescale.data.sources.readers import (
    UNIT_BYTES,
    ReadCounts,
    Record,
    WorkUnit,
    jsonl_records,
    jsonl_units,
    open_parquet,
    parquet_records,
    row_group_units,
    text_records,
    text_units,
)
from bytescale.storage.retry import unreadable


@dataclass(frozen=True, slots=True)
class RecordKind:
    """Which keys the records of a corpus have."""

    content: str
    required: tuple[tuple[str, ...], ...]
    """Of each tuple, a record has exactly one key."""
    optional: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    """Those of the required keys that ``data.fields`` names."""

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(itertools.chain(*self.required, self.optional))

    @property
    def is_text(self) -> bool:
        """Whether a record is one text, under the only key."""
        return self.content == "text"


def text_kind(text_key: str) -> RecordKind:
    """Return the kind of texts under ``text_key`` (``data.text_key``). Each text file is a record."""
    return RecordKind("text", ((text_key,),))


def kind_of(content: str, fields: Sequence[str]) -> RecordKind:
    """Return the kind of ``data.content``, which is not text; records of tokens must also have the keys ``fields``."""
    match content:
        case "tokens":
            required = (("tokens", "input_ids"), *((name,) for name in fields))
            return RecordKind(content, required, ("labels", "weights"), tuple(fields))
        case "messages":
            return RecordKind(content, (("messages",),), ("tools",))
        case _:
            return RecordKind(content, (("prompt",), ("completion",)))


def plan_units(files: Sequence[SourceFile], kind: RecordKind, unit_bytes: int = UNIT_BYTES) -> list[WorkUnit]:
    """Cut text, JSONL and Parquet files into units, in corpus order.

    The footer of each Parquet file is read, so that a missing column is found before any work is done.

    Raises ``ConfigError`` if a file is text, but ``kind`` is not; ``DataError`` if a Parquet file is broken, or lacks a
    column or has it in another type.
    """
    units: list[WorkUnit] = []
    try:
        for file_format, run in itertools.groupby(files, key=lambda file: file.format):
            if file_format in ("text", "python") and kind.is_text:
                units.extend(text_units(run, unit_bytes))
                continue
            for file in run:
                if file_format == "jsonl":
                    units.extend(jsonl_units(file, unit_bytes))
                elif file_format == "parquet":
                    with open_parquet(file.path) as opened:
                        _check_columns(opened.schema_arrow, kind, str(file.path))
                        units.extend(row_group_units(file, opened, unit_bytes))
                else:
                    assert file_format in ("text", "python"), f"files of format {file_format!r} hold no records"
                    raise ConfigError(
                        f"{file.path} is text, but data.content is {kind.content!r}",
                        so="text has no records with the keys that are needed",
                        fix="use JSONL or Parquet files (data.format names the format of files with other endings), or "
                        "data.content = 'text'",
                    )
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
                records = parquet_records(unit, kind.keys)
        for record in records:
            known = list(record.values)
            named = {name: record.values[name] for name in kind.keys if name in record.values}
            if kind.is_text:  # a text that is null is an empty one
                record.values = {name: "" if value is None else value for name, value in named.items()}
            else:
                record.values = {name: value for name, value in named.items() if value is not None}
            try:
                _check(record, known, kind)
            except DataError as error:
                counts.leave_out(error)
                continue
            if kind.is_text and not record.values[kind.keys[0]]:
                counts.num_empty += 1
            else:
                yield record
    except OSError as error:
        raise unreadable(error, path) from error


def _check(record: Record, known: Sequence[str], kind: RecordKind) -> None:
    """Raise ``DataError`` unless the record has its keys, and its text is one. ``known``: all keys of its line."""
    if any(sum(name in record.values for name in names) != 1 for names in kind.required):
        _check_keys([name for name in known if name not in kind.keys] + [*record.values], kind, record.place)
    if not kind.is_text:
        return
    (key,) = kind.keys
    text = record.values[key]
    if not isinstance(text, str):
        raise DataError(
            f"{record.place}: {key!r} is a JSON {type(text).__name__}, not a string",
            fix="mend the line or set data.text_key to the key that holds the text",
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON escapes can spell halves of surrogate pairs, which have no UTF-8 form
        raise DataError(
            f"{record.place}: {key!r} holds half a surrogate pair (\\ud8..)", fix="mend the line"
        ) from error


def _check_columns(schema: Any, kind: RecordKind, place: str) -> None:
    _check_keys(schema.names, kind, place, "column")
    if not kind.is_text:
        return
    import pyarrow.types

    (key,) = kind.keys
    found = schema.field(key).type
    if pyarrow.types.is_dictionary(found):
        found = found.value_type
    is_text = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    if not any(is_of_type(found) for is_of_type in is_text):
        raise DataError(
            f"{place}: column {key!r} is of type {found}, not string",
            fix="set data.text_key to the column that holds the text",
        )


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
        if names[0] in kind.fields:
            raise DataError(
                f"{place} has no {word} {names[0]!r}, which data.fields names",
                so="its tokens would lack it",
                fix="write a number per token, or leave the field out",
            )
        close = difflib.get_close_matches(names[0], known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        held_names = ", ".join(sorted(known)) or "none at all"
        what = f"{place} has no {word} {' or '.join(map(repr, names))}"
        if kind.is_text:
            for content, key in (("tokens", "tokens"), ("prompt", "completion"), ("messages", "messages")):
                if key in known:
                    hint = f"set data.content = {content!r} for records with {key!r}, or "
                    break
            raise DataError(what, fix=f"{hint}set data.text_key to one of {held_names}")
        raise DataError(
            f"{what}, which data.content = {kind.content!r} needs",
            fix=f"{hint}it has {held_names}; data.content is one of text, messages, prompt and tokens",
        )
