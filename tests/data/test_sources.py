from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

import pytest

from bytescale.common.errors import ConfigError, DataError
from bytescale.config.schema import DataConfig
from bytescale.data.sources.files import expand_sources, fingerprint_files
from bytescale.data.sources.records import ReadCounts, iter_records, kind_of, plan_units


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.py", "a/z.txt", "a/lines.jsonl", "a/rows.parquet", "a/tokens.bin", "a/tokens.idx", "a/d.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    for name in (".git/config", "__pycache__/b.pyc"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("left out")
    return tmp_path


def names(files: list, root: Path) -> list[str]:
    return [str(file.path.relative_to(root)) for file in files]


def test_a_folder_gives_its_files_sorted_without_hidden_ones_and_idx(tree: Path) -> None:
    files = expand_sources([str(tree)])
    assert names(files, tree) == ["b.py", "a/d.json", "a/lines.jsonl", "a/rows.parquet", "a/tokens.bin", "a/z.txt"]
    assert [file.format for file in files] == ["text", "jsonl", "jsonl", "parquet", "bin", "text"]
    assert not any(file.named for file in files)


def test_sources_keep_their_order_and_a_file_is_read_once(tree: Path) -> None:
    files = expand_sources([str(tree / "b.py"), str(tree / "**/*.txt"), str(tree / "b.py")])
    assert names(files, tree) == ["b.py", "a/z.txt"]
    assert [file.named for file in files] == [True, False]


def test_naming_the_idx_means_the_pair(tree: Path) -> None:
    assert names(expand_sources([str(tree / "a/tokens.idx")]), tree) == ["a/tokens.bin"]


def test_a_given_format_replaces_the_guess(tree: Path) -> None:
    assert [file.format for file in expand_sources([str(tree / "a/d.json")], "text")] == ["text"]


def test_the_standard_library_comes_from_the_interpreter() -> None:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = expand_sources(["python:stdlib"])
    paths = [file.path for file in files]
    assert stdlib / "argparse.py" in paths
    assert stdlib / "json/decoder.py" in paths
    assert all(path.suffix == ".py" for path in paths)
    assert not any("site-packages" in path.parts for path in paths)
    assert files == expand_sources(["python:stdlib"])


def test_the_functions_of_the_standard_library_have_a_long_tail() -> None:
    """Most documents are short, a few modules stay whole, and nothing but blank lines between definitions is lost."""
    files = expand_sources(["python:functions"])
    assert {file.format for file in files} == {"python"}
    assert not any({"test", "tests"} & set(Path(str(file.path)).parts) for file in files)
    kind = kind_of(DataConfig())
    units = plan_units(files, kind)
    texts = [record.values["text"] for unit in units for record in iter_records(unit, kind, ReadCounts())]
    assert sum(len(text) < 3000 for text in texts) > 0.9 * len(texts)
    assert sum(len(text) > 30_000 for text in texts) > 20
    letters = sum(len(re.sub(r"\s", "", text)) for text in texts)
    whole = sum(len(re.sub(r"\s", "", file.path.read_bytes().decode("utf-8"))) for file in files)
    assert letters == whole


def test_links_that_lead_nowhere_are_left_out(tree: Path) -> None:
    (tree / "a/gone.txt").symlink_to(tree / "nothing")
    (tree / "a/loop").symlink_to(tree)
    assert len(expand_sources([str(tree)])) == 6


def test_the_fingerprint_follows_every_change(tree: Path) -> None:
    before = fingerprint_files(expand_sources([str(tree)]))
    assert before == fingerprint_files(expand_sources([str(tree)]))
    status = (tree / "b.py").stat()
    os.utime(tree / "b.py", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert before != fingerprint_files(expand_sources([str(tree)]))


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ((), r"data.sources is empty"),
        (("{}/nothing",), r"'.*/nothing' does not exist as a file or folder \(looked in "),
        (("{}/*.nothing",), r"'.*/\*\.nothing' matches no file"),
        (("python:std",), r"did you mean 'python:stdlib'"),
        (("{}/b.py", "{}/empty"), r"'.*/empty' matches no file"),
    ],
)
def test_sources_that_match_nothing_are_named(tree: Path, sources: tuple[str, ...], message: str) -> None:
    (tree / "empty").mkdir()
    with pytest.raises(ConfigError, match=message):
        expand_sources([source.format(tree) for source in sources])


def test_an_unknown_format_is_named(tree: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.format is 'csv'.*auto, text, jsonl, parquet or bin"):
        expand_sources([str(tree)], "csv")


def test_an_idx_without_its_bin_is_named(tree: Path) -> None:
    (tree / "a/tokens.bin").unlink()
    with pytest.raises(DataError, match=r"tokens.bin cannot be read \(No such file"):
        expand_sources([str(tree / "a/tokens.idx")])
