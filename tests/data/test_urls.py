"""Sources that fsspec opens, reads that fail for a while, and broken records."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from bytescale.common.errors import ConfigError, DataError
from bytescale.data.loading.corpus import Corpus, prepare_corpus
from bytescale.data.sources.files import SourceFile
from bytescale.data.tokens.open_parts import local_copy
from bytescale.storage import retry
from bytescale.storage.place import Url
from bytescale.storage.retry import UnreadableError, with_retries
from tests.data.support import config, texts_of, write_jsonl, write_pair


@pytest.fixture
def memory() -> Iterator[Any]:
    """An empty remote file system in this process."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def same_corpus(left: Corpus, right: Corpus) -> bool:
    return left.index.fingerprint == right.index.fingerprint and texts_of(left) == texts_of(right)


def test_every_format_from_a_url(tmp_path: Path, memory: Any) -> None:
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["row one", "row two"]}), table)
    write_pair(tmp_path / "d", [[97, 98, 256]])
    contents = {
        "a.txt": b"plain",
        "b.jsonl": lines("one", "two"),
        "c.parquet": table.getvalue(),
        "d.bin": (tmp_path / "d.bin").read_bytes(),
        "d.idx": (tmp_path / "d.idx").read_bytes(),
    }
    (tmp_path / "here").mkdir()
    for name, content in contents.items():
        memory.pipe(f"/corpus/{name}", content)
        (tmp_path / "here" / name).write_bytes(content)
    here = prepare_corpus(config(tmp_path, tmp_path / "here"))
    for source in ("memory://corpus", "memory://corpus/*"):
        assert same_corpus(here, prepare_corpus(config(tmp_path, source)))
    one_by_one = [f"memory://corpus/{name}" for name in contents]
    assert texts_of(prepare_corpus(config(tmp_path, *one_by_one))) == texts_of(here)


def test_a_file_url_and_a_glob(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    write_jsonl(tmp_path / "b.jsonl", [{"text": "two"}])
    corpus = prepare_corpus(config(tmp_path, f"file://{tmp_path}/*.jsonl"))
    assert texts_of(corpus) == ["one", "two"]


def test_a_changed_remote_file_is_read_again(tmp_path: Path, memory: Any) -> None:
    memory.pipe("/a.jsonl", lines("old"))
    before = prepare_corpus(config(tmp_path, "memory://a.jsonl"))
    memory.pipe("/a.jsonl", lines("new"))
    after = prepare_corpus(config(tmp_path, "memory://a.jsonl"))
    assert (texts_of(before), texts_of(after)) == (["old"], ["new"])


def test_new_weights_of_a_remote_pair_are_read(tmp_path: Path, memory: Any) -> None:
    """The tokens are the same, and so is their file."""
    for name in ("c.bin", "c.idx", "c.weights.idx"):
        memory.pipe(f"/{name}", b"same")
    file = SourceFile(path=Url("memory://c.bin"), format="bin", num_bytes=4, mtime_ns=0)
    found = []
    for weights in (None, b"old", b"old", b"new"):
        if weights is not None:
            memory.pipe("/c.weights.bin", weights)
        copy = local_copy(file, tmp_path, ("weights",), whole=True)[0].with_suffix(".weights.bin")
        found.append(copy.read_bytes() if copy.exists() else None)
    assert found == [None, b"old", b"old", b"new"]


class FailingFile(io.BytesIO):
    """Fails as an HTTP or S3 client does: with an error of its own kind."""

    failures_left = 0

    def read(self, size: int | None = -1) -> bytes:
        if FailingFile.failures_left:
            FailingFile.failures_left -= 1
            raise RuntimeError("connection reset by peer")
        return super().read(size)


def test_a_failing_read_is_tried_again_and_then_given_up(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory.pipe("/a.jsonl", lines("text"))
    monkeypatch.setattr(type(memory), "_open", lambda self, path, *_, **__: FailingFile(self.cat(path)))
    monkeypatch.setattr(type(memory), "cat", lambda self, path: lines("text"))
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(retry, "RETRIES", 2)
    FailingFile.failures_left = 2
    assert texts_of(prepare_corpus(config(tmp_path, "memory://a.jsonl"))) == ["text"]
    assert caplog.text.count("Trying again in") == 2
    FailingFile.failures_left = 99
    with pytest.raises(
        DataError, match=r"memory:///?a.jsonl cannot be read \(RuntimeError: connection reset by peer\)"
    ):
        prepare_corpus(config(tmp_path / "other", "memory://a.jsonl"))
    assert FailingFile.failures_left == 99 - 3


def test_pauses_double_and_missing_files_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(retry.time, "sleep", pauses.append)

    def fail(cause: OSError) -> None:
        raise UnreadableError("gone") from cause

    with pytest.raises(UnreadableError):
        with_retries(lambda: fail(OSError("perhaps later")))
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    with pytest.raises(UnreadableError):
        with_retries(lambda: fail(FileNotFoundError("never")))
    assert len(pauses) == 4


def test_urls_that_lead_nowhere(tmp_path: Path, memory: Any) -> None:
    with pytest.raises(
        DataError, match=r"'memory://nothing' cannot be reached \(no such file or folder\).*credentials"
    ):
        prepare_corpus(config(tmp_path, "memory://nothing"))
    with pytest.raises(ConfigError, match=r"'nosuch://x' has no file system .*protocol"):
        prepare_corpus(config(tmp_path, "nosuch://x"))
    with pytest.raises(ConfigError, match=r"'memory://\*.jsonl' matches no file"):
        prepare_corpus(config(tmp_path, "memory://*.jsonl"))


def broken_lines(tmp_path: Path, *places: int) -> Path:
    records = [json.dumps({"text": f"line {n}"}) for n in range(50)]
    for place in places:
        records[place] = "{broken"
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(records) + "\n", encoding="utf-8")
    return path


def test_corrupt_records_are_counted_logged_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = broken_lines(tmp_path, 6, 30)
    corpus = prepare_corpus(config(tmp_path, path, max_corrupt_records=2))
    assert texts_of(corpus) == [f"line {n}" for n in range(50) if n not in (6, 30)]
    assert "broken.jsonl:7 is not JSON" in caplog.text
    assert "broken.jsonl:31 is not JSON" in caplog.text
    assert "the corpus is without 2 corrupt records (2 are allowed)" in caplog.text
    # Also when they were left out long ago, and the limit is lower now.
    with pytest.raises(DataError, match=r"2 records are corrupt, data.max_corrupt_records is 1: .*jsonl:7 .*jsonl:31"):
        prepare_corpus(config(tmp_path, path, max_corrupt_records=1))


def test_one_corrupt_record_too_many(tmp_path: Path) -> None:
    path = broken_lines(tmp_path, 1, 2, 3)
    with pytest.raises(DataError, match=r"3 records are corrupt, .* is 2: .*jsonl:2 .*jsonl:4 .*To fix: mend the rec"):
        prepare_corpus(config(tmp_path, path, max_corrupt_records=2))
    with pytest.raises(DataError, match=r"broken.jsonl:2 is not JSON .*To fix: mend or delete the line"):
        prepare_corpus(config(tmp_path, path))
