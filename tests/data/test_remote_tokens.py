"""Of a large remote ``.bin``, ranges of tokens are read when they are needed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from bytescale.common.errors import DataError
from bytescale.data.loading.corpus import Corpus, prepare_corpus
from bytescale.data.tokens import shards
from bytescale.data.tokens.tokenizer import ByteTokenizer
from bytescale.storage import retry
from bytescale.storage.place import Url
from tests.data.support import config, read_whole, write_pair

ENDINGS = (".bin", ".idx", ".meta.json")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A pair of 1000 tokens in 40 documents here, and a copy in fsspec's memory; 1999 bytes would be copied."""
    monkeypatch.setattr(shards, "COPIED_BYTES", 1999)
    dice = np.random.default_rng(0)
    lengths = dice.multinomial(960, np.ones(40) / 40) + 1
    write_pair(tmp_path / "pair", [dice.integers(0, 256, length).tolist() for length in lengths], ByteTokenizer())
    memory = fsspec.filesystem("memory")
    folder = f"/{uuid.uuid4().hex}"
    for ending in ENDINGS:
        memory.pipe(f"{folder}/pair{ending}", (tmp_path / f"pair{ending}").read_bytes())
    yield f"memory:/{folder}"
    memory.rm(folder, recursive=True)


def read(corpus: Corpus, row: int) -> list[int]:
    tokens, labels = read_whole(corpus, corpus.samples.name[[row]])
    return [*tokens.tolist(), *labels.tolist()]


def test_only_what_is_read_is_fetched(tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = prepare_corpus(config(tmp_path, tmp_path / "pair.bin"))
    there = prepare_corpus(config(tmp_path, f"{base}/pair.bin"))
    assert there.index.fingerprint == here.index.fingerprint
    assert there.metadata == here.metadata
    asked: list[tuple[int, int]] = []
    read_range = Url.read
    monkeypatch.setattr(Url, "read", lambda *given: asked.append(given[1:]) or read_range(*given))
    assert not list((tmp_path / "cache").rglob("*.bin"))
    row = 20
    assert read(there, row) == read(here, row)
    first = int(here.samples.start[row])
    assert asked == [(2 * first, 2 * (first + int(here.samples.length[row])))]
    rows = here.samples.name[[7, 3, 39, 20, 0]]
    for ours, theirs in zip(read_whole(here, rows), read_whole(there, rows), strict=True):
        assert ours.tolist() == theirs.tolist()
    assert [read(there, row) for row in range(40)] == [read(here, row) for row in range(40)]
    assert np.array_equal(there.parts[0][3:700], here.parts[0][3:700])
    assert len(there.parts[0][5:5]) == 0
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_a_small_pair_is_copied(tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "COPIED_BYTES", 2000)
    there = prepare_corpus(config(tmp_path, f"{base}/pair.bin"))
    assert len(list((tmp_path / "cache").rglob("*.bin"))) == 1
    assert there.parts[0][:].tolist() == prepare_corpus(config(tmp_path, tmp_path / "pair.bin")).parts[0][:].tolist()


def test_a_pair_whose_facts_are_not_known_is_copied_and_read_through(tmp_path: Path, base: str) -> None:
    fsspec.filesystem("memory").rm(f"{base.removeprefix('memory:/')}/pair.meta.json")
    there = prepare_corpus(config(tmp_path, f"{base}/pair.bin"))
    assert len(list((tmp_path / "cache").rglob("*.bin"))) == 1
    assert there.parts[0][:].tolist() == prepare_corpus(config(tmp_path, tmp_path / "pair.bin")).parts[0][:].tolist()


def test_a_server_that_gives_whole_files_only(tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Url, "has_ranges", lambda self: False)
    there = prepare_corpus(config(tmp_path, f"{base}/pair.bin"))
    assert len(there.parts[0][:]) == 1000
    assert len(list((tmp_path / "cache").rglob("*.bin"))) == 1


def test_a_range_that_fails_is_tried_again_and_then_named(
    tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retry, "RETRIES", 1)
    there = prepare_corpus(config(tmp_path, f"{base}/pair.bin"))
    answers = [OSError(5, "connection lost"), b"short", b"short"]

    def fail(self: Url, start: int, stop: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Url, "read", fail)
        with pytest.raises(DataError, match=r"pair.bin cannot be read \(5 bytes came for 40\)"):
            there.parts[0][100:120]
    assert "connection lost" in caplog.text
    assert (
        there.parts[0][100:120].tolist()
        == prepare_corpus(config(tmp_path, tmp_path / "pair.bin")).parts[0][100:120].tolist()
    )


def test_an_index_of_other_tokens(tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    path = f"{base.removeprefix('memory:/')}/pair.bin"
    memory.pipe(path, memory.cat(path)[:-20])
    monkeypatch.setattr(shards, "COPIED_BYTES", 0)
    with pytest.raises(DataError, match=r"describes 1000 tokens of 2 bytes = 2000 bytes, but .*pair.bin has 1980"):
        prepare_corpus(config(tmp_path, f"{base}/pair.bin"))
