from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from numpy.typing import NDArray

from bytescale.common.errors import DataError
from bytescale.config.schema import DataConfig
from bytescale.data.sources.files import SourceFile, expand_sources
from bytescale.data.tokens import shards
from bytescale.data.tokens.indexed import IndexedDataset
from bytescale.data.tokens.pairs import TokenMetadata, load_metadata, metadata_of
from bytescale.data.tokens.progress import Progress, ignore_progress
from bytescale.data.tokens.shards import ShardReader, write_as_pair
from bytescale.data.tokens.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, train_bpe
from tests.data.support import write_jsonl, write_pair
from tests.helpers.effort import one_of


def tokenised(
    files: Sequence[SourceFile], path: Path, tokenizer: Tokenizer | None = None, **settings: Any
) -> TokenMetadata:
    """The files as one pair, as ``bytescale data tokenize`` makes it; the cache lies beside the pair's folder."""
    data = DataConfig(cache_dir=str(path.parent.with_name("cache")))
    reader = ShardReader.of(data, tokenizer or ByteTokenizer())
    runs = itertools.groupby(files, key=lambda file: file.format == "bin")
    return write_as_pair(reader, [shard for _, run in runs for shard in reader.plan(list(run))], path, **settings)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "UNIT_BYTES", 500)
    monkeypatch.setattr(shards, "SHARD_BYTES", 2000)


class KilledTokenizer(ByteTokenizer):
    """Stands for a worker that the kernel kills for its memory."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []


@pytest.fixture
def mixed(tmp_path: Path) -> list[SourceFile]:
    """Every format at once, with empty documents, files that are not text, and EOS spelled out."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.txt").write_text("first text <|endoftext|>")
    (folder / "b.png").write_bytes(b"\xff")
    write_jsonl(folder / "c.jsonl", [{"text": f"line {i} " * (i % 7)} for i in range(50)])
    rows = [f"row {i}" for i in range(20)]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), folder / "d.parquet", row_group_size=6)
    write_pair(folder / "e", [[1, 2, 256], [], [3, 256]])
    (folder / "f.txt").write_text("last")
    return expand_sources([str(folder)])


def documents(path: Path) -> list[list[int]]:
    dataset = IndexedDataset.open(path)
    offsets = itertools.accumulate(dataset.index.document_lengths.tolist(), initial=0)
    return [dataset.tokens[start:stop].tolist() for start, stop in itertools.pairwise(offsets)]


def test_every_format_into_one_pair_in_order(tmp_path: Path, mixed: list[SourceFile]) -> None:
    metadata = tokenised(mixed, tmp_path / "out" / "pair.bin")
    texts = ["first text <|endoftext|>", *(f"line {i} " * (i % 7) for i in range(50) if i % 7)]
    texts += [f"row {i}" for i in range(20)]
    expected = [[*text.encode(), 256] for text in texts] + [[1, 2, 256], [3, 256], [*b"last", 256]]
    assert documents(tmp_path / "out" / "pair.bin") == expected
    assert metadata.num_documents == len(expected)
    assert metadata.num_tokens == sum(map(len, expected))
    assert metadata.longest_document_tokens == max(map(len, expected))
    assert (metadata.max_token_id, metadata.vocab_size, metadata.eos_id, metadata.tokenizer) == (256, 257, 256, "bytes")
    assert metadata.num_empty_documents == 8 + 1
    assert [Path(path).name for path in metadata.skipped_files] == ["b.png"]


def test_the_pair_does_not_depend_on_processes_units_or_shards(
    tmp_path: Path, mixed: list[SourceFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = [file for file in mixed if file.format != "bin"]
    tokenizer = JsonTokenizer(train_bpe(text, DataConfig(bpe_vocab_size=280), ignore_progress), name="trained")
    calls: list[Progress] = []
    reference = tokenised(text, tmp_path / "one" / "pair.bin", tokenizer)
    monkeypatch.setattr(shards, "UNIT_BYTES", 64)
    monkeypatch.setattr(shards, "SHARD_BYTES", 200)
    monkeypatch.setattr(shards, "_COPY_TOKENS", 20)
    (tmp_path / "cache").rename(tmp_path / "first")
    other = tokenised(text, tmp_path / "two" / "pair.bin", tokenizer, num_workers=3, progress=calls.append)
    assert [stage for stage, _ in itertools.groupby(call.stage for call in calls)] == ["tokenising", "writing pair.bin"]
    assert len(calls) > 10
    assert calls[-1].done_bytes == calls[-1].total_bytes
    assert len(list((tmp_path / "cache").rglob("*.idx"))) > 3
    assert reference == other == load_metadata(tmp_path / "one" / "pair.bin")
    for ending in (".bin", ".idx", ".meta.json"):
        paths = (tmp_path / folder / f"pair{ending}" for folder in ("one", "two"))
        assert len({path.read_bytes() for path in paths}) == 1


def test_metadata_of_a_pair_from_elsewhere_are_those_written(tmp_path: Path, mixed: list[SourceFile]) -> None:
    written = tokenised(mixed, tmp_path / "out" / "pair.bin")
    (tmp_path / "out" / "pair.meta.json").unlink()
    (file,) = expand_sources([str(tmp_path / "out" / "pair.bin")])
    calls: list[Progress] = []
    found = [metadata_of(IndexedDataset.open(file.path), file, tmp_path, calls.append) for _ in range(2)]
    assert found[0] == found[1]
    assert len(calls) == 1, "the second time they come from the cache"
    for name in ("content_hash", "lengths_hash", "max_token_id", "num_documents", "longest_document_tokens"):
        assert getattr(found[0], name) == getattr(written, name)
    assert found[0].vocab_size is None


def test_metadata_of_another_pair_are_not_believed(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[1, 2], [3]], ByteTokenizer())
    write_pair(tmp_path / "b", [[7], [8, 9]])
    (tmp_path / "a.meta.json").rename(tmp_path / "b.meta.json")
    (file,) = expand_sources([str(tmp_path / "b.bin")])
    assert metadata_of(IndexedDataset.open(file.path), file, tmp_path, ignore_progress).max_token_id == 9


@pytest.mark.usefixtures("small_units")
def test_bad_input_in_a_worker_reaches_the_caller_and_leaves_no_pair(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "fine"})] * 200
    lines[150] = "broken"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    files = expand_sources([str(tmp_path / "a.jsonl")])
    with pytest.raises(DataError, match=r"a.jsonl:151 is not JSON"):
        tokenised(files, tmp_path / "out" / "pair.bin", num_workers=2)
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_missing_column_is_found_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    pyarrow.parquet.write_table(pyarrow.table({"other": ["a"]}), tmp_path / "b.parquet")
    calls: list[Progress] = []
    with pytest.raises(DataError, match=r"b.parquet has no column 'text'"):
        tokenised(expand_sources([str(tmp_path)]), tmp_path / "out" / "pair.bin", progress=calls.append)
    assert calls == []


def test_a_bin_with_foreign_ids(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[1, 300]])
    with pytest.raises(DataError, match=r"a.bin holds id 300, but tokenizer 'bytes' has the ids 0 to 256"):
        tokenised(expand_sources([str(tmp_path / "a.bin")]), tmp_path / "out" / "pair.bin")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("small_units")
def test_a_worker_that_dies(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 50}] * 100)
    with pytest.raises(DataError, match=r"A process that tokenises died.*lower data.num_workers"):
        tokenised(expand_sources([str(path)]), tmp_path / "out" / "pair.bin", KilledTokenizer(), num_workers=2)
    assert not (tmp_path / "out").exists()


KILLED_PROGRAM = """
import sys, time
from pathlib import Path
from bytescale.data.sources.files import expand_sources
from bytescale.data.tokens import shards
from tests.data.test_tokenize import tokenised

def stop_in_the_middle(progress):
    if progress.stage == sys.argv[3] and progress.done_bytes > progress.total_bytes / 2:
        print("in the middle", flush=True)
        time.sleep(60)

if __name__ == "__main__":
    shards.UNIT_BYTES, shards.SHARD_BYTES, shards._COPY_TOKENS = 500, 2000, 500
    tokenised(expand_sources([sys.argv[1]]), Path(sys.argv[2]), num_workers=2, progress=stop_in_the_middle)
"""


@pytest.mark.parametrize("stage", one_of(["tokenising", "writing pair.bin"], "writing pair.bin"))
@pytest.mark.usefixtures("small_units")
def test_kill_minus_9_leaves_nothing_that_looks_finished(tmp_path: Path, stage: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 50}] * 200)
    output = tmp_path / "out" / "pair.bin"
    command = [sys.executable, "-c", KILLED_PROGRAM, str(path), str(output), stage]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n"
        workers = psutil.Process(process.pid).children(recursive=True)
        assert (len(workers) >= 2) == (stage == "tokenising")
        process.kill()
    # 1. Nothing looks finished, and opening it says so.
    left = [path.name for path in (tmp_path / "out").glob(".*")]
    assert [name.startswith(".pair.bin.") and name.endswith(".tmp") for name in left] == [True] * (
        stage != "tokenising"
    )
    with pytest.raises(DataError):
        IndexedDataset.open(output)
    # 2. Its workers do not outlive it.
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []
    # 3. The next run removes what is left, goes on behind the last shard, and finishes.
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.idx")}
    assert len(made) >= 3
    tokenised(expand_sources([str(path)]), output)
    assert sorted(path.name for path in output.parent.iterdir()) == ["pair.bin", "pair.idx", "pair.meta.json"]
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert len(list((tmp_path / "cache").rglob("*.tmp"))) == 0


def test_killed_between_bin_and_idx_the_old_pair_is_gone_and_the_new_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pair(tmp_path / "a", [[1, 2]])

    def die(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bytescale.data.tokens.pairs.write_atomically", die)
    with pytest.raises(KeyboardInterrupt):
        write_pair(tmp_path / "a", [[3], [4]])
    with pytest.raises(DataError, match=r"a.idx cannot be read"):
        IndexedDataset.open(tmp_path / "a.bin")
