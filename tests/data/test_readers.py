from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.errors import DataError
from bytescale.config.schema import DataConfig
from bytescale.data.sources.files import expand_sources
from bytescale.data.sources.records import ReadCounts, iter_records, kind_of, plan_units
from tests.data.support import write_jsonl

TEXT = kind_of(DataConfig())


def read(path: Path, text_key: str = "text", unit_bytes: int = 1 << 20, counts: ReadCounts | None = None) -> list[str]:
    """All texts of a source, unit by unit."""
    kind = kind_of(DataConfig(text_key=text_key))
    units = plan_units(expand_sources([str(path)]), kind, unit_bytes)
    counts = counts if counts is not None else ReadCounts()
    return [record.values[text_key] for unit in units for record in iter_records(unit, kind, counts)]


def write_parquet(path: Path, columns: dict, rows_per_group: int = 100) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_per_group)
    return path


def test_a_text_file_is_a_document_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
    (tmp_path / "b.txt").write_bytes("\ufeffwith a mark é".encode())
    assert read(tmp_path) == ["one\r\ntwo\n", "with a mark é"]


def test_small_text_files_share_a_unit(tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text("x" * 10)
    units = plan_units(expand_sources([str(tmp_path)]), TEXT, unit_bytes=35)
    assert [len(unit.files) for unit in units] == [3, 3, 3, 1]


def test_files_that_are_not_text_are_counted_and_empty_ones_too(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "b.o").write_bytes(b"ELF\0\0")
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "d.txt").write_text("text")
    counts = ReadCounts()
    assert read(tmp_path, counts=counts) == ["text"]
    assert [Path(name).name for name in counts.skipped_files] == ["a.png", "b.o"]
    assert counts.num_empty == 1


def test_a_file_that_is_named_must_be_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"a.txt is not text: byte 3 is not UTF-8"):
        read(tmp_path / "a.txt")


@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=30), unit_bytes=st.integers(1, 200))
def test_jsonl_units_give_each_line_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], unit_bytes: int
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("jsonl") / "a.jsonl", [{"text": text} for text in texts])
    counts = ReadCounts()
    assert read(path, unit_bytes=unit_bytes, counts=counts) == [text for text in texts if text]
    assert counts.num_empty == sum(not text for text in texts)


def test_jsonl_null_is_empty_and_blank_lines_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \n{"text": null}\r\n{"text": "b"}')
    counts = ReadCounts()
    assert read(path, counts=counts) == ["a", "b"]
    assert counts.num_empty == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"a.jsonl:3 is not JSON .*delimiter.*\{\"text\": \"a\""),
        (b'{"text": "\xff"}', r"a.jsonl:3 is not JSON .*utf-8"),
        (b'["text"]', r"a.jsonl:3 is a JSON list, not an object"),
        (b'{"texts": "a", "id": 1}', r"a.jsonl:3 has no key 'text'.*did you mean 'texts'.*id, texts"),
        (b"{}", r"a.jsonl:3 has no key 'text'"),
        (b'{"text": 12}', r"a.jsonl:3: 'text' is of type int, not a string"),
        (b'{"text": "\\ud800"}', r"a.jsonl:3: 'text' holds half a surrogate pair"),
    ],
)
def test_a_broken_jsonl_line_is_named_whatever_the_unit(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    for unit_bytes in (1, 7, 1000):
        with pytest.raises(DataError, match=message):
            read(path, unit_bytes=unit_bytes)


def test_another_key(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"content": "a", "text": 1}])
    assert read(path, "content") == ["a"]


@pytest.mark.parametrize("unit_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    "kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())]
)
def test_parquet_rows_in_order(tmp_path: Path, unit_bytes: int, kind: pyarrow.DataType) -> None:
    texts = [f"row {i}" for i in range(250)]
    column = pyarrow.array([*texts, None, ""]).cast(kind)
    path = write_parquet(tmp_path / "a.parquet", {"id": list(range(252)), "text": column})
    assert len(plan_units(expand_sources([str(path)]), TEXT, unit_bytes)) == (3 if unit_bytes == 1 else 1)
    counts = ReadCounts()
    assert read(path, unit_bytes=unit_bytes, counts=counts) == texts
    assert counts.num_empty == 2


def test_parquet_without_the_column(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"contents": ["a"], "id": [1]})
    with pytest.raises(DataError, match=r"a.parquet has no column 'content'.*did you mean 'contents'.*contents, id"):
        read(path, "content")


def test_parquet_column_of_another_type(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": [1, 2]})
    with pytest.raises(DataError, match=r"a.parquet, row 1: 'text' is of type int, not a string"):
        read(path)


def test_a_broken_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("not Parquet")
    with pytest.raises(DataError, match=r"a.parquet is not a Parquet file"):
        read(path)


def test_parquet_pages_that_are_broken(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": [f"row {i} {'x' * 50}" for i in range(1000)]})
    content = bytearray(path.read_bytes())
    content[100:3000] = b"\xff" * 2900
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a.parquet cannot be read near row"):
        read(path)


def test_a_file_that_vanishes_after_listing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    units = plan_units(expand_sources([str(path)]), TEXT)
    path.unlink()
    with pytest.raises(DataError, match=r"a.jsonl cannot be read \(No such file"):
        list(iter_records(units[0], TEXT, ReadCounts()))


def test_the_place_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "b"}) + "\n")
    units = plan_units(expand_sources([str(path)]), TEXT)
    places = [record.place() for record in iter_records(units[0], TEXT, ReadCounts())]
    assert places == [f"{path}:1", f"{path}:2"]
