from __future__ import annotations

import multiprocessing
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bytescale.common.errors import ConfigError, DataError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import check_vocabulary, plan_shards, prepare_corpus
from bytescale.data.order.batches import BatchSampler
from bytescale.data.order.epoch import SampleStream
from bytescale.data.tokens import shards
from bytescale.data.tokens.progress import Progress
from bytescale.data.tokens.samples import make_samples
from bytescale.data.tokens.tokenizer import ByteTokenizer
from tests.data.support import config, index_of, memory_corpus, read, read_whole, texts_of, write_jsonl, write_pair

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)
POLICIES = st.sampled_from(["split", "truncate", "drop"])


def samples_slowly(lengths: list[int], context_length: int, over_length: str) -> list[tuple[int, int, int, int]]:
    """The obvious twin of ``make_samples``: (document, start, length, targets) of each sample."""
    samples = []
    first = 0
    for document, length in enumerate(lengths):
        kept = length
        if length > context_length and over_length == "drop":
            kept = 0
        if length > context_length and over_length == "truncate":
            kept = context_length
        for start in range(0, kept, context_length):
            stop = min(start + context_length, kept)
            targets = sum(token + 1 < kept for token in range(start, stop))
            samples.append((document, first + start, stop - start, targets))
        first += length
    return samples


@given(lengths=LENGTHS, context_length=st.integers(1, 45), over_length=POLICIES)
def test_samples_are_those_of_the_obvious_way(lengths: list[int], context_length: int, over_length: str) -> None:
    settings = DataConfig(context_length=context_length, over_length=over_length)
    made, counts = make_samples(3, index_of(lengths), settings)
    table = made[:]
    assert table.part.tolist() == [3] * len(table)
    rows = zip(
        table.document.tolist(), table.start.tolist(), table.length.tolist(), table.num_targets.tolist(), strict=True
    )
    assert list(rows) == samples_slowly(lengths, context_length, over_length)
    too_long = sum(length > context_length for length in lengths)
    assert (counts.num_split, counts.num_truncated, counts.num_dropped) == {
        "split": (too_long, 0, 0),
        "truncate": (0, too_long, 0),
        "drop": (0, 0, too_long),
    }[over_length]
    assert counts.num_lost_tokens == sum(lengths) - table.num_tokens
    assert counts.num_empty_documents + counts.num_documents == len(lengths)
    if over_length == "split":
        assert table.num_tokens == sum(lengths)
        assert table.num_targets.sum() == sum(length - 1 for length in lengths if length)


@given(
    lengths=LENGTHS, context_length=st.integers(1, 45), over_length=POLICIES, parts=st.integers(1, 3), data=st.data()
)
def test_reading_ranges_of_samples(
    lengths: list[int], context_length: int, over_length: str, parts: int, data: st.DataObject
) -> None:
    """Against a loop over tokens that knows documents only: the label is the next token of the same document."""
    kept = [length for length in lengths if length and (over_length != "drop" or length <= context_length)]
    assume(kept)  # a corpus without a sample is refused
    corpus = memory_corpus(lengths, context_length, over_length, num_parts=min(parts, len(lengths)))
    table = corpus.samples
    ranges = []
    for _ in range(data.draw(st.integers(0, 6))):
        sample = data.draw(st.integers(0, len(table) - 1))
        start = data.draw(st.integers(0, int(table.length[sample])))
        ranges.append((sample, start, data.draw(st.integers(start, int(table.length[sample])))))
    samples, starts, stops = np.array(ranges, dtype=np.int64).reshape(-1, 3).T
    tokens, labels, _ = read(corpus, table.name[samples], starts, stops)
    expected_tokens, expected_labels = [], []
    ends = np.cumsum(lengths)
    cuts = [len(lengths) * part // corpus.index.num_parts for part in range(corpus.index.num_parts)]  # as memory_corpus
    for sample, start, stop in ranges:
        document = cuts[table.part[sample]] + table.document[sample]
        end, before = ends[document], ends[cuts[table.part[sample]]] - lengths[cuts[table.part[sample]]]
        if over_length == "truncate":
            end = min(end, end - lengths[document] + context_length)
        for place in range(before + table.start[sample] + start, before + table.start[sample] + stop):
            expected_tokens.append(place)
            expected_labels.append(place + 1 if place + 1 < end else IGNORE_INDEX)
    assert tokens.tolist() == expected_tokens
    assert labels.tolist() == expected_labels


def test_text_and_bins_together(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    write_pair(tmp_path / "b", [[97, 98, 256], [99, 256]], ByteTokenizer())
    write_jsonl(tmp_path / "c.jsonl", [{"text": "hello"}, {"text": ""}])
    corpus = prepare_corpus(config(tmp_path, *(tmp_path / name for name in ("a.txt", "b.bin", "c.jsonl"))))
    assert texts_of(corpus) == ["abc", "hello", "ab", "c"]
    assert corpus.metadata.vocab_size == 257
    assert corpus.metadata.counts.num_empty_documents == 1
    assert isinstance(corpus.parts[0].base, np.memmap)
    tokens, labels, _ = read(corpus, corpus.samples.name[[3, 0]], [0, 1], [2, 4])
    assert tokens.tolist() == [99, 256, 98, 99, 256]
    assert labels.tolist() == [256, IGNORE_INDEX, 99, 256, IGNORE_INDEX]


def test_the_second_call_tokenises_nothing(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one two three " * 50}] * 5)
    calls: list[Progress] = []
    settings = config(tmp_path, tmp_path / "a.jsonl", tokenizer="bpe", bpe_vocab_size=270)
    first = prepare_corpus(settings, calls.append)
    assert {progress.stage for progress in calls} == {"training the tokenizer", "tokenising"}
    calls.clear()
    second = prepare_corpus(settings, calls.append)
    assert calls == []
    assert second.index.fingerprint == first.index.fingerprint
    assert second.samples.length.tolist() == first.samples.length.tolist()
    assert second.tokenizer is not None
    assert second.metadata.vocab_size == second.tokenizer.vocab_size <= 270


def test_a_changed_source_is_tokenised_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    before = prepare_corpus(config(tmp_path, tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_text("newer")
    after = prepare_corpus(config(tmp_path, tmp_path / "a.txt"))
    assert texts_of(after) == ["newer"]
    assert after.index.fingerprint != before.index.fingerprint


def test_the_fingerprint_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    prints = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("the same text")
        prints.append(prepare_corpus(config(tmp_path / name, tmp_path / name / "a.txt")).index.fingerprint)
    assert prints[0] == prints[1]
    source = tmp_path / "here/a.txt"
    others = [
        prepare_corpus(config(tmp_path, source, context_length=5)).index.fingerprint,
        prepare_corpus(config(tmp_path, source, context_length=5, over_length="truncate")).index.fingerprint,
    ]
    assert len({prints[0], *others}) == 3


def _prepare_in_a_process(settings: DataConfig, results: multiprocessing.Queue) -> None:
    calls: list[Progress] = []
    corpus = prepare_corpus(settings, calls.append)
    results.put((corpus.index.fingerprint, any(progress.done_bytes for progress in calls)))


def test_several_processes_at_once_do_the_work_once(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"document {i} " * 20} for i in range(200)])
    settings = config(tmp_path, tmp_path / "a.jsonl", tokenizer="bpe", bpe_vocab_size=300)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_prepare_in_a_process, args=(settings, results)) for _ in range(3)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    assert len({fingerprint for fingerprint, _ in outcomes}) == 1
    assert sum(worked for _, worked in outcomes) in (1, 2), "one trains the tokenizer, one (or the same) tokenises"
    assert len(list((tmp_path / "cache/tokens").rglob("*.idx"))) == 1
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_bin_from_elsewhere_needs_no_tokenizer_but_takes_one(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[1, 2, 700]])
    corpus = prepare_corpus(config(tmp_path, tmp_path / "a.bin"))
    assert corpus.tokenizer is None
    assert corpus.metadata.vocab_size == 701
    check_vocabulary(corpus.metadata, 701)
    with pytest.raises(
        ConfigError, match=r"The .bin files .* ids up to 700, but the model's vocab_size is 700.*at least 701"
    ):
        check_vocabulary(corpus.metadata, 700)


def test_our_own_bin_knows_its_vocabulary(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[1, 2]], ByteTokenizer())
    assert prepare_corpus(config(tmp_path, tmp_path / "a.idx")).metadata.vocab_size == 257


def test_tokenizer_that_exceeds_the_model(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    corpus = prepare_corpus(config(tmp_path, tmp_path / "a.txt"))
    with pytest.raises(ConfigError, match=r"Tokenizer 'bytes' has ids up to 256, but the model's vocab_size is 256"):
        check_vocabulary(corpus.metadata, 256)


def test_two_tokenizers(tmp_path: Path) -> None:
    class OtherTokenizer(ByteTokenizer):
        name = "other"
        fingerprint = "other"

    write_pair(tmp_path / "a", [[1, 2]], OtherTokenizer())
    write_pair(tmp_path / "b", [[1, 2]], ByteTokenizer())
    write_pair(tmp_path / "c", [[1, 999]])
    (tmp_path / "d.txt").write_text("text")
    with pytest.raises(DataError, match=r"different tokenizers: other, bytes"):
        prepare_corpus(config(tmp_path, tmp_path / "a.bin", tmp_path / "b.bin"))
    with pytest.raises(DataError, match=r"a.bin was made with tokenizer 'other', but tokenizer 'bytes'"):
        prepare_corpus(config(tmp_path, tmp_path / "a.bin", tmp_path / "d.txt"))
    with pytest.raises(DataError, match=r"c.bin holds id 999, but tokenizer 'bytes' has the ids 0 to 256"):
        prepare_corpus(config(tmp_path, tmp_path / "c.bin", tmp_path / "d.txt"))


def test_bpe_without_text(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[1, 2]])
    with pytest.raises(ConfigError, match=r"data.tokenizer is 'bpe', but all sources are .bin files"):
        prepare_corpus(config(tmp_path, tmp_path / "a.bin", tokenizer="bpe"))


def test_an_empty_corpus_says_why(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"corpus is empty: no file holds any text \(.*text\)"):
        prepare_corpus(config(tmp_path, text))
    (text / "a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"corpus is empty: 1 files are not UTF-8 text"):
        prepare_corpus(config(tmp_path, text))
    (text / "b.txt").write_text("long")
    with pytest.raises(DataError, match=r"1 documents are longer than data.context_length = 4 and 1 files are not"):
        prepare_corpus(config(tmp_path, text, context_length=4, over_length="drop"))


def test_an_idx_that_does_not_match_its_bin(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[1, 2, 3]])
    (tmp_path / "a.bin").write_bytes(b"\0" * 4)
    with pytest.raises(DataError, match=r"a.idx describes 3 tokens of 2 bytes = 6 bytes, but .*a.bin has 4"):
        prepare_corpus(config(tmp_path, tmp_path / "a.bin"))


def test_text_is_tokenised_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Window by window, the next one in the background; tokens and order are those of a corpus that is read at once."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 200 * 1024)
    dice = np.random.default_rng(0)
    for number in range(12):
        records = [{"text": "".join(dice.choice(list("abcd "), int(size)))} for size in dice.integers(10, 2000, 260)]
        write_jsonl(tmp_path / f"{number:02d}.jsonl", records)
    settings = config(
        tmp_path, tmp_path / "*.jsonl", shuffle_window_mib=1, batch_tokens=200_000, cache_dir=str(tmp_path / "later")
    )
    calls: list[Progress] = []
    later = prepare_corpus(settings, calls.append, text_later=True, ahead=True)
    tokens = tmp_path / "later/tokens"
    assert calls == []
    assert later.index.metadata.num_parts_read == 0
    assert not tokens.exists()
    sampler = BatchSampler(later.index, settings)
    assert 1 < later.index.metadata.num_parts_read < 12
    assert {progress.stage for progress in calls} == {"tokenising"}
    deadline = time.monotonic() + 300
    while len(list(tokens.rglob("*.idx"))) == later.index.metadata.num_parts_read:  # the next window follows by itself
        assert time.monotonic() < deadline
        time.sleep(0.05)
    at_once = prepare_corpus(replace(settings, cache_dir=str(tmp_path / "at-once")))
    other = BatchSampler(at_once.index, settings)
    while (batch := sampler.next_batch()).epoch == 0:
        same = other.next_batch()
        assert sampler.state_dict() == other.state_dict()
        for mine, theirs in zip(
            read_whole(later, batch.samples.name), read_whole(at_once, same.samples.name), strict=True
        ):
            assert np.array_equal(mine, theirs)
    assert later.metadata == at_once.metadata


def test_closing_a_corpus_ends_what_runs_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a unit of text, also while another process holds the lock; and nothing half-written stays."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 200 * 1024)
    for number in range(20):
        write_jsonl(tmp_path / f"{number:02d}.jsonl", [{"text": f"{number}{n:05d}" * 50} for n in range(1000)])
    settings = config(tmp_path, tmp_path / "*.jsonl", shuffle_window_mib=3, batch_tokens=100_000)
    corpus = prepare_corpus(settings, text_later=True, ahead=True)
    BatchSampler(corpus.index, settings)
    corpus.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bytescale-tokeniser")]
    made = len(list((tmp_path / "cache").rglob("*.idx")))
    assert made < 20
    assert not list((tmp_path / "cache").rglob("*.tmp"))
    time.sleep(0.5)
    assert len(list((tmp_path / "cache").rglob("*.idx"))) == made


def test_a_broken_file_is_found_when_its_window_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again by whoever asks again: an error in the background is nobody's, so it must not be lost."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 200 * 1024)
    for number in range(8):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"text": f"{number}{n:05d}" * 50} for n in range(1000)])
    settings = config(tmp_path, tmp_path / "*.jsonl", shuffle_window_mib=1, batch_tokens=100_000)
    planned, _ = plan_shards(settings)
    index = prepare_corpus(replace(settings, cache_dir=str(tmp_path / "whole"))).index
    stream = SampleStream(index, np.arange(8), 1, settings.shuffle_seed)
    last = stream.windows(0)[-1][0]
    broken = planned[last].units[0].files[0].path
    assert isinstance(broken, Path)
    with broken.open("r+b") as file:  # the same size
        file.write(b"#")
    sampler = BatchSampler(prepare_corpus(settings, text_later=True).index, settings)
    states, error = [sampler.state_dict()], None
    while error is None:
        try:
            sampler.next_batch()
            states.append(sampler.state_dict())
        except DataError as found:
            error = found
    assert f"{broken.name}:1 is not JSON" in str(error)
    assert len(states) > 5
    resumed = BatchSampler(prepare_corpus(settings, text_later=True).index, settings, states[-1])
    for _ in range(2):
        with pytest.raises(DataError, match=rf"{broken.name}:1 is not JSON"):
            resumed.next_batch()
