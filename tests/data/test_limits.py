"""Texts, pages and tokenizers that would fill the memory are refused before; everything else is read as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from bytescale.common.errors import DataError
from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import Corpus, prepare_corpus
from bytescale.data.sources import parquet, records
from bytescale.data.tokens import examples, tokenizer_limits
from bytescale.data.tokens.tokenizer import JsonTokenizer
from bytescale.storage.retry import UnreadableError

GROWING: dict[str, dict[str, Any]] = {
    "a character becomes many": {"normalizer": normalizers.Sequence([normalizers.Replace("a", "a" * 20)] * 7)},
    "at places without a width": {
        "normalizer": normalizers.Sequence([normalizers.Replace(tokenizers.Regex("(?=.)"), "aa")] * 9)
    },
    "a long text in front": {"normalizer": normalizers.Prepend("a" * 1000)},
    "bytes of bytes": {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 20)},
}
HONEST: list[dict[str, Any]] = [
    {"pre_tokenizer": pre_tokenizers.ByteLevel()},
    {"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])},
    {
        "normalizer": normalizers.Sequence(
            [normalizers.NFKD(), normalizers.Lowercase(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
        ),
        "pre_tokenizer": pre_tokenizers.Metaspace(),
    },
]


def saved(folder: Path, model: Any = None, **parts: Any) -> Path:
    """A tokenizer.json: letters and the end of a document."""
    letters = {letter: number for number, letter in enumerate(["<|endoftext|>", "▁", *"abcdefgh \n"])}
    made = tokenizers.Tokenizer(model or tokenizers.models.BPE(vocab=letters, merges=[]))
    for name, part in parts.items():
        setattr(made, name, part)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("parts", GROWING.values(), ids=list(GROWING))
def test_a_tokenizer_that_grows_text_is_refused(tmp_path: Path, parts: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"makes up to .* characters of one"):
        JsonTokenizer.from_file(saved(tmp_path, **parts), bos="auto")


@pytest.mark.parametrize("parts", HONEST)
def test_usual_tokenizers_are_not(tmp_path: Path, parts: dict[str, Any]) -> None:
    assert len(JsonTokenizer.from_file(saved(tmp_path, **parts)).encode_batch(["abc"])[0])


def test_a_tokenizer_that_tries_long_words_is_refused(tmp_path: Path) -> None:
    vocabulary = [("a" * length, -1.0) for length in range(1, 3000)] + [("<|endoftext|>", 0.0)]
    with pytest.raises(DataError, match="tries words of up to 2999 characters"):
        JsonTokenizer.from_file(saved(tmp_path, tokenizers.models.Unigram(vocabulary, 0)))


def test_a_panic_while_loading_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path)
    content = {**json.loads(path.read_text()), "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        JsonTokenizer.from_file(path)
    assert capfd.readouterr().err == ""


def corpus_of(folder: Path, tokenizer: str = "bytes", **more: Any) -> Corpus:
    return prepare_corpus(DataConfig(sources=(str(folder),), tokenizer=tokenizer, cache_dir=f"{folder}-cache", **more))


def tokens_of(corpus: Corpus, folder: Path) -> list[int]:
    pairs = sorted(Path(f"{folder}-cache", "tokens").glob("*/*.bin"))
    return np.concatenate([np.fromfile(path, "<u2") for path in pairs]).tolist()


def test_a_text_of_too_many_tokens_is_named_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_limits, "MOST_TOKENS", 5000)
    monkeypatch.setattr(tokenizer_limits, "_SURE_CHARACTERS", 1000)
    name = str(saved(tmp_path, pre_tokenizer=pre_tokenizers.Whitespace()))
    (tmp_path / "corpus").mkdir()
    lines = [json.dumps({"text": text}) for text in ("ab " * 10, "abcd " * 3000, "cd " * 10, "abcd " * 900)]
    (tmp_path / "corpus" / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"a\.jsonl:2: A text of 15000 characters has about 12\d\d\d tokens"):
        corpus_of(tmp_path / "corpus", name)
    corpus = corpus_of(tmp_path / "corpus", name, max_corrupt_records=1)
    assert corpus.metadata.counts.num_tokens == 21 + 21 + 3601


def test_a_huge_line_is_named_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where units begin inside of it: what follows is read as ever."""
    monkeypatch.setattr(records, "MOST_RECORD_BYTES", 1000)
    (tmp_path / "corpus").mkdir()
    lines = [json.dumps({"text": text}) for text in ("first", "x" * 5000, "second", "third")]
    path = tmp_path / "corpus" / "a.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"a\.jsonl:2 has more than the 1000 bytes"):
        corpus_of(tmp_path / "corpus")
    for unit_bytes in (64, 700, 2000, 10_000):
        kind, texts, counts = records.kind_of(DataConfig()), [], records.ReadCounts(max_corrupt=1)
        for unit in records.plan_units(records_files(path), kind, unit_bytes):
            texts += [record.values["text"] for record in records.iter_records(unit, kind, counts)]
        assert (texts, len(counts.corrupt)) == (["first", "second", "third"], 1)
    (tmp_path / "corpus" / "b.txt").write_text("y" * 2000)
    with pytest.raises(DataError, match="2 records are corrupt"):
        corpus_of(tmp_path / "corpus", max_corrupt_records=1)


def records_files(path: Path) -> Any:
    from bytescale.data.sources.files import expand_sources

    return expand_sources([str(path)])


def test_pages_are_as_large_as_their_headers_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plain and nested columns, with dictionaries and statistics, in every version of the format."""
    texts = ["ab" * 500 + str(number) for number in range(4000)]
    table = pyarrow.table({"text": texts, "messages": [[{"role": "user", "content": text}] for text in texts]})
    for options in ({}, {"data_page_version": "2.0"}, {"compression": "zstd", "write_statistics": True}):
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(
            table, path, data_page_size=2**16, write_batch_size=64, use_dictionary=False, **options
        )
        small = sizes_of(path)
        assert all(2**16 < size < 2**18 for size in small[:2]), small
        pyarrow.parquet.write_table(
            table, path, data_page_size=2**30, write_batch_size=2**16, use_dictionary=False, **options
        )
        assert all(size > 4_000_000 for size in (sizes_of(path)[0], sizes_of(path)[-1])), sizes_of(path)
    pyarrow.parquet.write_table(table, path, dictionary_pagesize_limit=2**30)
    assert sizes_of(path)[0] > 4_000_000, "its dictionary"
    monkeypatch.setattr(parquet, "MOST_PAGE_BYTES", 2**20)
    with pytest.raises(DataError, match=r"has pages of 4\d+ bytes"):
        list(parquet.rows_of(path, 0, 1, ["text"]))
    assert len(list(parquet.rows_of(path, 0, 1, []))) == 4000, "of other columns"


def sizes_of(path: Path) -> list[int]:
    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(0)
    with path.open("rb") as file:
        found = {
            group.column(number).path_in_schema: parquet._largest_pages(file, group.column(number))
            for number in range(group.num_columns)
        }
    return [found["text"], found["messages.list.element.content"]]


def test_rows_of_uneven_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MOST_RECORD_BYTES", 10_000)
    texts = ["a"] * 2000 + ["b" * 3000] * 10 + ["c" * 20_000, "d"]
    (tmp_path / "corpus").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "corpus" / "a.parquet")
    found = dict(parquet.rows_of(tmp_path / "corpus" / "a.parquet", 0, 1, ["text"]))
    assert found.pop(2011) is None
    assert [row["text"] for row in found.values()] == [text for text in texts if len(text) < 20_000]
    with pytest.raises(DataError, match=r"a\.parquet, row 2011 has more than the"):
        corpus_of(tmp_path / "corpus")


@pytest.mark.parametrize("content", ["text", "tokens"])
def test_pieces_of_a_unit_are_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    """Also where reading fails in the middle, and begins again."""
    lines = [{"text": "t" * length, "tokens": [7] * length} for length in range(1, 60)]
    for name in ("whole", "pieces"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"text": "", "tokens": [1, 2]}])))
    whole = corpus_of(tmp_path / "whole", content=content, max_corrupt_records=1)
    monkeypatch.setattr(examples, "_PIECE_TOKENS", 100)
    monkeypatch.setattr(examples, "_BATCH_CHARACTERS", 10)
    monkeypatch.setattr("bytescale.storage.retry.FIRST_PAUSE_SECONDS", 0.001)
    iter_records, faults = examples.iter_records, [45, 30, 3]

    def faulty(*arguments: Any) -> Iterator[Any]:
        fails_at = faults.pop() if faults else -1
        for number, record in enumerate(iter_records(*arguments)):
            if number == fails_at:
                raise UnreadableError("the disk is gone for a moment")
            yield record

    monkeypatch.setattr(examples, "iter_records", faulty)
    pieces = corpus_of(tmp_path / "pieces", content=content, max_corrupt_records=1)
    assert not faults
    assert tokens_of(pieces, tmp_path / "pieces") == tokens_of(whole, tmp_path / "whole")
    assert pieces.metadata.counts == whole.metadata.counts
