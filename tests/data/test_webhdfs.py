"""``webhdfs://`` and ``hdfs://`` sources. The servers follow the documented protocol: no real Hadoop is at hand."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from bytescale.common.errors import ConfigError, DataError
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.storage import filesystems, retry
from tests.data.remote_files import check_changes_are_seen, check_every_kind_of_source, json_lines
from tests.data.support import config, texts_of
from tests.data.webhdfs_server import WebHdfs, webhdfs_server

pytest.importorskip("requests", reason="webhdfs:// is read with requests: pip install 'bytescale[webhdfs]'")


@pytest.fixture
def hdfs(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebHdfs]:
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 0.01)
    with webhdfs_server() as served:
        yield served
    fsspec.get_filesystem_class("webhdfs").clear_instance_cache()


def test_every_kind_of_source(tmp_path: Path, hdfs: WebHdfs) -> None:
    put = lambda name, content: hdfs.put(f"/data/corpus/{name}", content)  # noqa: E731
    check_every_kind_of_source(tmp_path, f"{hdfs.url}/data/corpus", put)
    assert any(node == "data" and "OPEN" in what for node, what, _ in hdfs.requests)


def test_question_marks_would_be_options(tmp_path: Path, hdfs: WebHdfs) -> None:
    hdfs.put("/data/a.jsonl", json_lines("one"))
    with pytest.raises(ConfigError, match=r"everything behind \? as options\. The whole folder .* To fix: use \*"):
        prepare_corpus(config(tmp_path, f"{hdfs.url}/data/?.jsonl"))
    assert texts_of(prepare_corpus(config(tmp_path, f"{hdfs.url}/data/[ab].jsonl"))) == ["one"]


def test_a_changed_file_is_read_again(tmp_path: Path, hdfs: WebHdfs) -> None:
    check_changes_are_seen(tmp_path, f"{hdfs.url}/data", lambda name, content: hdfs.put(f"/data/{name}", content))


@pytest.mark.parametrize("node", ["name", "data"])
def test_500s_are_tried_again_and_then_named(
    tmp_path: Path, hdfs: WebHdfs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, node: str
) -> None:
    """A data node's error page is not the file's content."""
    monkeypatch.setattr(retry, "RETRIES", 2)
    hdfs.put("/a.jsonl", json_lines("one", "two"))
    hdfs.failing, hdfs.failures_left = node, 2
    assert texts_of(prepare_corpus(config(tmp_path, f"{hdfs.url}/a.jsonl"))) == ["one", "two"]
    assert caplog.text.count("Trying again in") == 2
    hdfs.failures_left = 10**6
    with pytest.raises(DataError, match=r"/a.jsonl'? cannot be (read|reached) \(500 RuntimeException: out of luck\)"):
        prepare_corpus(config(tmp_path / "other", f"{hdfs.url}/a.jsonl"))
    assert 10**6 - hdfs.failures_left == 3


def test_another_user_is_refused(tmp_path: Path, hdfs: WebHdfs) -> None:
    hdfs.put("/data/a.jsonl", json_lines("one"))
    for source in ("data/a.jsonl", "data"):
        asked = len(hdfs.requests)
        with pytest.raises(DataError, match=r"cannot be reached \(403 AccessControl.*user=thief.*webhdfs://USER@HOST"):
            prepare_corpus(config(tmp_path, f"webhdfs://thief@{hdfs.host}/{source}"))
        assert len(hdfs.requests) - asked == 1, "trying again is hopeless"


def test_a_standby_name_node_is_asked_again(tmp_path: Path, hdfs: WebHdfs) -> None:
    hdfs.put("/a.jsonl", json_lines("one"))
    hdfs.failing, hdfs.failures_left = "name", 1
    hdfs.failure = (403, "StandbyException", "Operation category READ is not supported in state standby")
    assert texts_of(prepare_corpus(config(tmp_path, f"{hdfs.url}/a.jsonl"))) == ["one"]


def test_what_is_not_there(tmp_path: Path, hdfs: WebHdfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRIES", 1)
    with pytest.raises(DataError, match=r"/nothing' cannot be reached \(404 .*File does not exist: /nothing\)"):
        prepare_corpus(config(tmp_path, f"{hdfs.url}/nothing"))
    began = time.monotonic()
    with pytest.raises(DataError, match=r"'webhdfs://127.0.0.1:1/a' cannot be reached \(ConnectionError: .*network"):
        prepare_corpus(config(tmp_path, "webhdfs://127.0.0.1:1/a"))
    assert time.monotonic() - began < 60  # limits are for hangs


def test_a_server_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``requests`` alone would wait for ever."""
    monkeypatch.setattr(filesystems, "READ_SECONDS", 0.2)
    monkeypatch.setattr(retry, "RETRIES", 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(DataError, match=r"cannot be reached \(ReadTimeout: .*timed out"):
            prepare_corpus(config(tmp_path, f"webhdfs://127.0.0.1:{port}/a"))


def test_hadoop_s_own_library_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """pyarrow tells of 70 places where it looked, in 8 KB."""
    pytest.importorskip("pyarrow.fs")
    for name in ("JAVA_HOME", "HADOOP_HOME", "CLASSPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ARROW_LIBHDFS_DIR", str(tmp_path))
    fix = r"To fix: set JAVA_HOME, HADOOP_HOME .* or use webhdfs://HOST:9870"
    with pytest.raises(
        ConfigError, match=rf"'hdfs://name:8020/data' needs Hadoop's own client library .*{fix}"
    ) as info:
        prepare_corpus(config(tmp_path, "hdfs://name:8020/data"))
    assert len(str(info.value)) < 700
    assert "Trying again" not in caplog.text


def test_requests_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ImportError('webHDFS access requires "requests" to be installed')

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    with pytest.raises(ConfigError, match=r"needs a package .*To fix: pip install 'bytescale\[webhdfs\]'"):
        prepare_corpus(config(tmp_path, "webhdfs://host/a"))
