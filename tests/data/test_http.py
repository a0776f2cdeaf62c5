"""Sources on a real HTTP server on loopback: what is read, and what happens when the server fails."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bytescale.common.errors import DataError
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.sources import retry
from tests.data.remote_files import serving
from tests.data.support import config, texts_of, write_pair

pytest.importorskip("aiohttp", reason="fsspec reads http:// with aiohttp")


class Files:
    """What the server has, and how many of the next requests it answers with 500."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.failures_left = 0
        self.only_reads = False  # and not the questions for a file's size
        self.forbidden = False
        self.requests: list[tuple[str, str | None, int]] = []  # path, range asked for, status
        self.url = ""


@pytest.fixture
def files() -> Iterator[Files]:
    served = Files()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            content = served.contents.get(self.path)
            asked = self.headers.get("Range")
            status = 200
            if served.forbidden:
                status, content = 403, b""
            elif content is None:
                status, content = 404, b""
            elif served.failures_left and (asked or not served.only_reads):
                served.failures_left -= 1
                status, content = 500, b""
            elif asked:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                whole, content = len(content), content[int(first) : int(last or len(content)) + 1]
                status = 206
            served.requests.append((self.path, asked, status))
            self.send_response(status)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{zlib.crc32(served.contents.get(self.path, b""))}"')
            if status == 206:
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(content) - 1}/{whole}")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_port}"
    with serving(server):
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
    assert again.fingerprint == corpus.fingerprint
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
    assert texts_of(prepare_corpus(config(tmp_path, f"{files.url}/a.jsonl", read_retries=3))) == ["one", "two"]
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
        prepare_corpus(config(tmp_path, f"{files.url}/a.jsonl", read_retries=2))


def test_a_file_that_is_not_there_and_a_server_that_is_not(tmp_path: Path, files: Files) -> None:
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
