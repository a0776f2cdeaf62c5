"""``bytescale data tokenize`` and ``stats``, called as the command line calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bytescale.cli.data import StatsConfig, TokenizeConfig, document_lengths
from bytescale.cli.main import run
from bytescale.common.errors import ConfigError
from bytescale.data.tokens.indexed import IndexedDataset
from tests.data.support import memory_corpus, write_jsonl, write_pair


def settings(tmp_path: Path, **changes: object) -> TokenizeConfig:
    values = {
        "sources": (str(tmp_path / "a.jsonl"),),
        "output": str(tmp_path / "out/pair"),
        "cache_dir": str(tmp_path / "cache"),
        "num_workers": 1,
        **changes,
    }
    return TokenizeConfig(**values)  # type: ignore[arg-type]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * length} for length in (10, 600, 5000, 0)])


def test_tokenize_writes_a_pair_and_says_what_it_did(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert settings(tmp_path, output=str(tmp_path / "[red] :smile:/pair")).run() == 0  # no markup
    assert IndexedDataset.open(tmp_path / "[red] :smile:/pair.bin").index.document_lengths.tolist() == [11, 601, 5001]
    output = capsys.readouterr().out
    assert f"-> {tmp_path}/[red] :smile:/pair.bin, pair.idx" in output
    assert "3 documents, 5613 tokens" in output
    assert "longest document 5001 tokens" in output
    assert "left out: 1 empty documents" in output
    assert "tokenizer bytes: 257 ids" in output


def test_an_existing_pair_is_replaced_only_on_request(tmp_path: Path, source: Path) -> None:
    write_pair(tmp_path / "out/pair", [[1]])
    with pytest.raises(ConfigError, match=r"pair.idx exists.*--overwrite"):
        settings(tmp_path).run()
    assert settings(tmp_path, overwrite=True).run() == 0
    assert IndexedDataset.open(tmp_path / "out/pair.bin").index.num_documents == 3


def test_the_output_is_no_source(tmp_path: Path) -> None:
    write_pair(tmp_path / "pair", [[1]])
    pair = str(tmp_path / "pair")
    with pytest.raises(ConfigError, match=r"pair.bin is both a source and the output"):
        settings(tmp_path, sources=(pair + ".bin",), output=pair, overwrite=True).run()


def test_no_workers(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ConfigError, match=r"--num_workers is 0"):
        run("data tokenize", [str(source), "--output", str(tmp_path / "out"), "--num-workers", "0"])


@pytest.mark.parametrize("name", ["pair.idx", "pair.bin", "a.jsonl"])
def test_stats_of_an_index_a_pair_and_text_agree(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    settings(tmp_path, output=str(tmp_path / "pair")).run()
    capsys.readouterr()
    cache_dir = str(tmp_path / "cache")
    config = StatsConfig(sources=(str(tmp_path / name),), cache_dir=cache_dir, num_workers=1, json=True)
    assert config.run() == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["num_documents"] == [1, 1, 0, 0, 1] + [0] * 9
    assert stats["num_tokens"] == [11, 601, 0, 0, 5001] + [0] * 9
    assert (stats["longest_tokens"], stats["median_tokens"], stats["median_token_tokens"]) == (5001, 601, 5001)


def test_stats_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pair(tmp_path / "pair", [[1] * 600, [1] * 300])
    assert StatsConfig(sources=(str(tmp_path / "pair.idx"),)).run() == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("  to 1K")]
    assert row == ["to", "1K", "1", "50.0", "600", "66.7", "100.0"]


def test_document_lengths_are_those_before_splitting() -> None:
    assert document_lengths(memory_corpus([3, 25, 0, 10], 10)).tolist() == [3, 25, 10]
