"""The same small corpus for every kind of remote source."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import BaseServer

import pyarrow
import pyarrow.parquet

from bytescale.data.loading.corpus import prepare_corpus
from tests.data.support import config, texts_of, write_pair

TEXTS = ["plain", "one", "two", "row one", "row two", "ab"]


LOOK_SECONDS = 0.01
"""How often a server looks whether it is to end. The default of 0.5 s would be the end of every test."""


@contextmanager
def serving(*servers: BaseServer) -> Iterator[None]:
    """Each server in a thread of its own, until the block is left."""
    threads = [threading.Thread(target=server.serve_forever, args=(LOOK_SECONDS,)) for server in servers]
    for thread in threads:
        thread.start()
    yield
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        thread.join()
        server.server_close()


def json_lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def every_format(tmp_path: Path) -> dict[str, bytes]:
    """A file of each format, whose documents in order are ``TEXTS``, and a hidden one."""
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["row one", "row two"]}), table)
    write_pair(tmp_path / "d", [[97, 98, 256]])
    return {
        "a.txt": b"plain",
        "b.jsonl": json_lines("one", "two"),
        "c/c.parquet": table.getvalue(),
        "d.bin": (tmp_path / "d.bin").read_bytes(),
        "d.idx": (tmp_path / "d.idx").read_bytes(),
        ".hidden/e.txt": b"not to be found",
    }


def check_every_kind_of_source(tmp_path: Path, base: str, put: Callable[[str, bytes], object]) -> None:
    """Folder, glob and single files below ``base`` give the corpus that the same files give here."""
    contents = every_format(tmp_path)
    for name, content in contents.items():
        put(name, content)
        path = tmp_path / "here" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    here = prepare_corpus(config(tmp_path, tmp_path / "here"))
    assert texts_of(here) == TEXTS
    for number, source in enumerate((base, f"{base}/", f"{base}/**")):
        there = prepare_corpus(config(tmp_path / str(number), source))
        assert (there.index.fingerprint, texts_of(there)) == (here.index.fingerprint, TEXTS), source
    assert texts_of(prepare_corpus(config(tmp_path, f"{base}/*.jsonl"))) == ["one", "two"]
    one_by_one = [f"{base}/{name}" for name in contents if not name.startswith(".")]
    assert texts_of(prepare_corpus(config(tmp_path, *one_by_one))) == TEXTS
    assert prepare_corpus(config(tmp_path, f"{base}/d.idx")).metadata.counts.num_tokens == 3


def check_changes_are_seen(tmp_path: Path, base: str, put: Callable[[str, bytes], object]) -> None:
    """An object that is replaced by one of the same size, in a folder and by name."""
    for source in (base, f"{base}/a.jsonl"):
        put("a.jsonl", json_lines("old"))
        before = prepare_corpus(config(tmp_path, source))
        assert prepare_corpus(config(tmp_path, source)).index.fingerprint == before.index.fingerprint
        put("a.jsonl", json_lines("new"))
        after = prepare_corpus(config(tmp_path, source))
        assert (texts_of(before), texts_of(after)) == (["old"], ["new"])
        assert before.index.content_hash([0]) != after.index.content_hash([0])
