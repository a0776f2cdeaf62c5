"""``data.verify``: what rots in the cache is made again from its source, and a ``.bin`` that rots stops the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale.common.errors import DataError
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.tokens.indexed import HEADER
from bytescale.data.tokens.tokenizer import ByteTokenizer
from tests.data.support import config, texts_of, write_pair

TEXT = "the ring moves keys around"


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 2
    path.write_bytes(content)


@pytest.mark.parametrize("ending", [".bin", ".idx", ".meta.json"])
def test_a_cache_that_has_rotted_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, ending: str) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    settings = config(tmp_path, tmp_path / "a.txt", verify=True)
    first = prepare_corpus(settings)
    (path,) = (tmp_path / "cache").rglob(f"*{ending}")
    whole = path.read_bytes()
    assert prepare_corpus(settings).index.fingerprint == first.index.fingerprint
    assert path.read_bytes() == whole
    assert "is not what was written" not in caplog.text
    flip(path, {".bin": 6, ".idx": HEADER.size, ".meta.json": whole.find(b"content_hash") + 20}[ending])
    again = prepare_corpus(settings)
    assert "is not what was written: its source is tokenised again" in caplog.text
    assert (again.index.fingerprint, texts_of(again)) == (first.index.fingerprint, [TEXT])
    assert path.read_bytes() == whole


def test_a_cache_that_is_truncated_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    settings = config(tmp_path, tmp_path / "a.txt", verify=True)
    prepare_corpus(settings)
    (path,) = (tmp_path / "cache").rglob("*.bin")
    path.write_bytes(path.read_bytes()[:-4])
    assert texts_of(prepare_corpus(settings)) == [TEXT]


def test_without_it_a_flipped_bit_is_not_noticed(tmp_path: Path) -> None:
    """Otherwise the tests above would show nothing."""
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    prepare_corpus(config(tmp_path, tmp_path / "a.txt"))
    (path,) = (tmp_path / "cache").rglob("*.bin")
    flip(path, 6)
    assert texts_of(prepare_corpus(config(tmp_path, tmp_path / "a.txt"))) != [TEXT]


def test_a_pair_that_has_rotted_stops_the_run(tmp_path: Path) -> None:
    write_pair(tmp_path / "d", [[97, 98, 256], [99, 256]], ByteTokenizer())
    settings = config(tmp_path, tmp_path / "d.bin", verify=True)
    prepare_corpus(settings)
    flip(tmp_path / "d.bin", 2)
    with pytest.raises(
        DataError, match=r"d\.bin holds other tokens than when it was made.*To fix: copy the pair again"
    ):
        prepare_corpus(settings)
