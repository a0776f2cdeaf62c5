"""``s3://`` sources: s3fs and botocore as they are, against a server that speaks S3, checks keys and can fail."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from bytescale.cli.data import StatsConfig, TokenizeConfig
from bytescale.common.errors import ConfigError, DataError
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.tokens.indexed import IndexedDataset
from bytescale.storage import filesystems, retry
from tests.data.remote_files import TEXTS, check_changes_are_seen, check_every_kind_of_source, every_format, json_lines
from tests.data.s3_server import S3Server, s3_server
from tests.data.support import config, texts_of
from tests.helpers.effort import one_of

pytest.importorskip("s3fs", reason="s3:// is read with s3fs: pip install 'bytescale[s3]'")
pytest.importorskip("flask_cors", reason="moto's server needs it: make setup")
pytest.importorskip("moto", reason="the S3 server of these tests: make setup")


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def server(running: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    """An empty server that the environment names, as a user's does."""
    environment = {
        "AWS_ENDPOINT_URL": running.url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no-credentials"),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 0.01)
    new_client()
    running.failures_left, running.failing_method, running.status = 0, "", "500 Internal Server Error"
    fsspec.filesystem("s3").mkdir("bucket")
    running.requests.clear()
    yield running
    running.failures_left = 0
    monkeypatch.undo()
    ask_moto(running, "reset-auth", b"inf")
    ask_moto(running, "reset")
    new_client()


def new_client() -> None:
    """Forget clients with credentials and endpoints of earlier."""
    fsspec.filesystem("s3").__class__.clear_instance_cache()


def ask_moto(server: S3Server, command: str, content: bytes = b"") -> None:
    """One of moto's own commands."""
    plain = {"Content-Type": "text/plain"}
    request = urllib.request.Request(f"{server.url}/moto-api/{command}", data=content, headers=plain, method="POST")
    urllib.request.urlopen(request, timeout=10).close()


def putter(folder: str) -> Callable[[str, bytes], object]:
    system = fsspec.filesystem("s3", skip_instance_cache=True)  # another client: ours has to find out by itself
    return lambda name, content: system.pipe(f"{folder}/{name}", content)


def test_every_kind_of_source(tmp_path: Path, server: S3Server) -> None:
    check_every_kind_of_source(tmp_path, "s3://bucket/corpus", putter("bucket/corpus"))
    assert texts_of(prepare_corpus(config(tmp_path, "s3://bucket"))) == TEXTS


def test_what_is_in_the_cache_is_not_read_again(tmp_path: Path, server: S3Server) -> None:
    put = putter("bucket/corpus")
    for name, content in every_format(tmp_path).items():
        put(name, content)
    first = prepare_corpus(config(tmp_path, "s3://bucket/corpus"))
    server.requests.clear()
    assert prepare_corpus(config(tmp_path, "s3://bucket/corpus")).index.fingerprint == first.index.fingerprint
    objects = {path for method, path in server.requests if method == "GET" and path != "/bucket"}
    assert objects == {"/bucket/corpus/c/c.parquet"}, "a Parquet file's footer is all that is looked at"


def test_a_changed_object_is_read_again(tmp_path: Path, server: S3Server) -> None:
    check_changes_are_seen(tmp_path, "s3://bucket/corpus", putter("bucket/corpus"))


def test_commands(tmp_path: Path, server: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    put = putter("bucket/corpus")
    for name, content in every_format(tmp_path).items():
        put(name, content)
    cache = str(tmp_path / "cache")
    assert StatsConfig(sources=("s3://bucket/corpus",), cache_dir=cache, num_workers=1, json=True).run() == 0
    assert sum(json.loads(capsys.readouterr().out)["num_documents"]) == len(TEXTS)
    assert StatsConfig(sources=("s3://bucket/corpus/d.idx",), cache_dir=cache, num_workers=1, json=True).run() == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"][0] == 3
    output = str(tmp_path / "pair")
    server.failures_left = 4
    tokenize = TokenizeConfig(sources=("s3://bucket/corpus",), output=output, cache_dir=cache, num_workers=1)
    assert tokenize.run() == 0
    assert IndexedDataset.open(Path(f"{output}.bin")).index.num_documents == len(TEXTS)


@pytest.mark.parametrize("method", one_of(["HEAD", "GET"], "GET"))
def test_500s_are_tried_again_and_then_named(
    tmp_path: Path,
    server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    monkeypatch.setattr(retry, "RETRIES", 2)
    putter("bucket")("a.jsonl", json_lines("one", "two"))
    server.failing_method = method
    server.failures_left = 4  # the client itself tries twice
    assert texts_of(prepare_corpus(config(tmp_path, "s3://bucket/a.jsonl"))) == ["one", "two"]
    assert server.failures_left == 0
    assert caplog.text.count("Trying again in") == 2
    server.failures_left = 10**6
    with pytest.raises(DataError, match=r"s3://bucket/a.jsonl'? cannot be (read|reached) \(.*500.*To fix:"):
        prepare_corpus(config(tmp_path / "other", "s3://bucket/a.jsonl"))
    assert 10**6 - server.failures_left == 6


def test_an_object_that_may_be_listed_but_not_read(tmp_path: Path, server: S3Server) -> None:
    putter("bucket")("a.jsonl", json_lines("one"))
    server.failing_method, server.status, server.failures_left = "GET", "403 Forbidden", 10**6
    with pytest.raises(DataError, match=r"^s3://bucket/a.jsonl cannot be read \(.*403.*To fix: .*credentials"):
        prepare_corpus(config(tmp_path, "s3://bucket/a.jsonl"))
    assert 10**6 - server.failures_left == 1, "trying again is hopeless"


def test_wrong_keys(tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    putter("bucket")("a.jsonl", json_lines("one"))
    ask_moto(server, "reset-auth", b"0")  # from now on, keys have to be known and allowed to
    new_client()
    assert_refused(tmp_path, "s3://bucket/a.jsonl", r"403|InvalidAccessKeyId", server)
    assert_refused(tmp_path, "s3://bucket/*.jsonl", r"403|InvalidAccessKeyId", server)
    assert_refused(tmp_path, "s3://bucket", r"403|InvalidAccessKeyId", server)


def test_no_keys_are_found_at_once(tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    putter("bucket")("a.jsonl", json_lines("one"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    new_client()
    assert_refused(tmp_path, "s3://bucket/a.jsonl", "NoCredentialsError", server)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    new_client()
    assert_refused(tmp_path, "s3://bucket/a.jsonl", r"ProfileNotFound.*\(nobody\)", server)
    monkeypatch.delenv("AWS_PROFILE")
    fsspec.filesystem("s3", key="key", secret="secret").chmod("bucket/a.jsonl", "public-read")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"anon": True})  # what FSSPEC_S3_ANON=true does at the start
    new_client()
    assert texts_of(prepare_corpus(config(tmp_path, "s3://bucket/a.jsonl"))) == ["one"]


@pytest.mark.exhaustive
def test_a_silent_metadata_service_is_not_waited_for(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys botocore asks the machine's own service for them: outside EC2 nobody answers there."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        new_client()
        assert_refused(tmp_path, "s3://bucket/a.jsonl", "NoCredentialsError", server)


def assert_refused(tmp_path: Path, source: str, reason: str, server: S3Server) -> None:
    """One error, after few questions and seconds."""
    asked, began = len(server.requests), time.monotonic()
    with pytest.raises(
        DataError, match=rf"{source.replace('*', '.')}.*cannot be reached .*({reason}).*To fix: .*AWS_PROFILE"
    ):
        prepare_corpus(config(tmp_path, source))
    assert time.monotonic() - began < 60  # limits are for hangs
    assert len(server.requests) - asked <= 2, "trying again is hopeless"


def test_names_that_do_not_exist(tmp_path: Path, server: S3Server) -> None:
    putter("bucket")("corpus/a.jsonl", json_lines("one"))
    for source, reason in (
        ("s3://nobucket/a.jsonl", "NoSuchBucket"),
        ("s3://nobucket", "404.*HeadBucket"),
        ("s3://bucket/nothing", "no such file or folder"),
        ("s3://Bucket_!/a.jsonl", "Invalid bucket name"),
    ):
        with pytest.raises(DataError, match=rf"'{source}' cannot be reached \(.*{reason}.*To fix: check the URL"):
            prepare_corpus(config(tmp_path, source))
    with pytest.raises((ConfigError, DataError), match=r"'s3://nobucket/\*.jsonl' (matches no file|cannot be reached)"):
        prepare_corpus(config(tmp_path, "s3://nobucket/*.jsonl"))


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://nowhere.invalid"])
def test_no_server(tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setattr(retry, "RETRIES", 1)
    new_client()
    began = time.monotonic()
    with pytest.raises(DataError, match=rf"'s3://bucket/a.jsonl' cannot be reached .*{endpoint}.*network"):
        prepare_corpus(config(tmp_path, "s3://bucket/a.jsonl"))
    assert time.monotonic() - began < 60  # limits are for hangs


def test_a_user_s_own_settings_come_first(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 7}, "anon": True})
    new_client()
    system, path = filesystems.open_filesystem("s3://bucket/a")
    assert (path, system.anon, system.config_kwargs["read_timeout"]) == ("bucket/a", True, 7)
    assert system.config_kwargs["connect_timeout"] == filesystems.CONNECT_SECONDS


def test_s3fs_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    with pytest.raises(ConfigError, match=r"'s3://bucket' needs a package .*To fix: pip install 'bytescale\[s3\]'"):
        prepare_corpus(config(tmp_path, "s3://bucket"))
