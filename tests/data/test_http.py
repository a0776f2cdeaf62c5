"""Sources on a real HTTP server on loopback: what is read, and what happens when the server fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bytescale.common.errors import DataError
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.storage import retry
from tests.data.http_server import Files, http_server
from tests.data.support import config, texts_of, write_pair

pytest.importorskip("aiohttp", reason="fsspec reads http:// with aiohttp")


@pytest.fixture
def files() -> Iterator[Files]:
    with http_server() as served:
        yield served


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def test_jsonl_and_a_pair_over_http(tmp_path: Path, files: Files) -> None:
    write_pair(tmp_path / "d", [[97, 98, 256], [99, 256]])
    files.contents = {
        "/a.jsonl": lines("one", "two"),
        "/d.bin": (tmp_path / "d.bin").read_bytes(),
        "/d.idx": (tmp_path / "d.idx").read_bytes(),
    }
    corpus = prepare_corpus(config(tmp_path, f"{files.url}/a.jsonl", f"{files.url}/d.bin"))
    assert texts_of(corpus) == ["one", "two", "ab", "c"]
    seen = len(files.requests)
    again = prepare_corpus(config(tmp_path, f"{files.url}/a.jsonl", f"{files.url}/d.bin"))
    assert again.index.fingerprint == corpus.index.fingerprint
    assert not [path for path, asked, _ in files.requests[seen:] if asked], "what was read is in the cache"


def test_a_changed_file_is_read_again(tmp_path: Path, files: Files) -> None:
    texts = []
    for text in ("old", "new"):  # of one length
        files.contents = {"/a.jsonl": lines(text)}
        texts += texts_of(prepare_corpus(config(tmp_path, f"{files.url}/a.jsonl")))
    assert texts == ["old", "new"]


def test_a_query_is_no_ending(tmp_path: Path, files: Files) -> None:
    """As in signed URLs."""
    files.contents = {"/a.jsonl?signature=x.y": lines("one", "two")}
    assert texts_of(prepare_corpus(config(tmp_path, f"{files.url}/a.jsonl?signature=x.y"))) == ["one", "two"]


@pytest.mark.parametrize("only_reads", [False, True])
def test_500s_are_tried_again(
    tmp_path: Path,
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    only_reads: bool,
) -> None:
    files.only_reads = only_reads
    files.contents = {"/a.jsonl": lines("one", "two")}
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 0.01)
    files.failures_left = 2
    assert texts_of(prepare_corpus(config(tmp_path, f"{files.url}/a.jsonl"))) == ["one", "two"]
    assert files.failures_left == 0
    assert [status for _, _, status in files.requests].count(500) == 2
    assert "Trying again in" in caplog.text


@pytest.mark.parametrize(
    ("only_reads", "message"),
    [
        (False, r"http://127.0.0.1:\d+/a.jsonl' cannot be reached \(.*500.*To fix: check"),
        (True, r"http://127.0.0.1:\d+/a.jsonl cannot be read \(.*500.*To fix: mend it"),
    ],
)
def test_a_server_that_keeps_failing_is_named(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch, only_reads: bool, message: str
) -> None:
    files.only_reads = only_reads
    files.contents = {"/a.jsonl": lines("one")}
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 0.01)
    files.failures_left = 10**6
    with pytest.raises(DataError, match=message):
        prepare_corpus(config(tmp_path, f"{files.url}/a.jsonl"))


def test_a_file_that_is_not_there_and_a_server_that_is_not(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 0.01)
    with pytest.raises(DataError, match=r"http://127.0.0.1:\d+/none.jsonl' cannot be reached"):
        prepare_corpus(config(tmp_path, f"{files.url}/none.jsonl"))
    with pytest.raises(
        DataError, match=r"'http://127.0.0.1:1/a.jsonl' cannot be reached .*network and the credentials"
    ):
        prepare_corpus(config(tmp_path, "http://127.0.0.1:1/a.jsonl"))


def test_credentials_that_are_refused(tmp_path: Path, files: Files) -> None:
    files.contents = {"/a.jsonl": lines("one")}
    files.forbidden = True
    with pytest.raises(DataError, match=r"a.jsonl' cannot be reached \(.*403.*check the URL, .* and the credentials"):
        prepare_corpus(config(tmp_path, f"{files.url}/a.jsonl"))
