"""What a process keeps of a corpus, and that looking samples up late changes nothing."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.order import epoch
from bytescale.data.order.batches import BatchSampler
from bytescale.data.tokens.pairs import IndexedWriter, MetadataGatherer
from bytescale.data.tokens.samples import make_samples, trained_of
from tests.data.support import config, index_of, memory_corpus, sampler_of

MOST_BYTES = 16
"""Of each document and process, besides pages of files, which the processes of a machine share."""


def write_corpus(path: Path, num_documents: int) -> None:
    """Documents of 2 to 14 tokens."""
    lengths = np.random.default_rng(0).integers(2, 15, num_documents)
    tokens = np.arange(lengths.sum()).astype("<u2")
    gatherer = MetadataGatherer(tokens.dtype)
    gatherer.add(tokens)
    with IndexedWriter(path, tokens.dtype) as writer:
        writer.add_documents(tokens, lengths)
        writer.commit(gatherer.finish(lengths).to_json())


def bytes_of_opening(settings: DataConfig) -> np.ndarray:
    """What is kept after a few batches, and the peak until then."""
    gc.collect()
    tracemalloc.start()
    sampler = BatchSampler(prepare_corpus(settings).index, settings)
    for _ in range(4):
        sampler.next_batch()
    found = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return np.array(found)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"context_length": 64}, id="each document is a sample"),
        pytest.param({"context_length": 8, "over_length": "split"}, id="split"),
        pytest.param({"context_length": 12, "over_length": "drop"}, id="dropped"),
    ],
)
def test_a_process_keeps_few_bytes_of_a_document(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Between two sizes, so that what does not grow with the corpus does not count. Before this, 122 were kept."""
    used, sizes = [], (300_000, 600_000)
    for num_documents in sizes:
        write_corpus(tmp_path / f"{num_documents}.bin", num_documents)
        used.append(bytes_of_opening(config(tmp_path, tmp_path / f"{num_documents}.bin", **settings)))
    kept, peak = (used[1] - used[0]) / (sizes[1] - sizes[0])
    assert 3 <= kept <= MOST_BYTES, "nothing was measured" if kept < 3 else f"{kept:.1f} bytes are kept"
    assert peak <= MOST_BYTES


def test_weights_of_zero_and_one_are_kept_as_counts() -> None:
    samples, _ = make_samples(0, index_of([3, 0, 2]), DataConfig(context_length=2, over_length="split"))
    counts, sums = trained_of(samples, np.array([9, 1, 0, 9, 1], dtype=np.float32), "weights")
    assert (counts.dtype.itemsize, counts.tolist(), sums) == (4, [1, 0, 1], None)
    counts, sums = trained_of(samples, np.array([9, 1, 0.5, 9, -3], dtype=np.float32), "weights")
    assert sums is not None
    assert (counts.tolist(), sums.tolist()) == ([2, 0, 1], [1.5, 0.0, 3.0])


@pytest.mark.parametrize(("most_mapped", "num_handles"), [(4, 4), (3, 0)])
def test_few_files_are_mapped_and_of_many_none_takes_a_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_mapped: int, num_handles: int
) -> None:
    for number in range(4):
        write_corpus(tmp_path / f"{number}.bin", 9)
    monkeypatch.setattr("bytescale.data.loading.corpus.MOST_OPEN", most_mapped)
    found: list[int] = []

    def count_handles(*_: object) -> None:
        open_files = [os.readlink(handle) for handle in Path("/proc/self/fd").iterdir() if handle.is_symlink()]
        found.append(sum(path.startswith(str(tmp_path)) and path.endswith(".idx") for path in open_files))

    monkeypatch.setattr("bytescale.data.tokens.shards.check_same_tokenizer", count_handles)  # of every part it opens
    corpus = prepare_corpus(config(tmp_path, tmp_path))
    assert max(found) == max(num_handles, 1)
    found.clear()
    count_handles()
    assert found == [num_handles]
    assert corpus.samples.length.tolist() == np.random.default_rng(0).integers(2, 15, 9).tolist() * 4


@pytest.mark.parametrize("num_samples", [0, 1, 50, 2**18 + 5])
def test_the_order_is_that_of_all_draws_at_once(num_samples: int) -> None:
    draws = np.random.PCG64(np.random.SeedSequence((7, 2, 1))).random_raw(num_samples)
    assert np.array_equal(epoch.epoch_order(num_samples, 7, 2, 1), np.argsort(draws, kind="stable"))


def test_samples_may_be_looked_up_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and states are the same, also of a sampler that begins in the middle of what was looked up together."""
    corpus = memory_corpus(list(range(1, 60)), 20, num_parts=5, part_mib=4, num_bins=2)
    for window_mib in (8, 2**40):
        monkeypatch.setattr(epoch, "_BLOCK", 2**16)
        wanted = sampler_of(corpus.index, 45, 1, window_mib=window_mib)
        monkeypatch.setattr(epoch, "_BLOCK", 3)
        given = sampler_of(corpus.index, 45, 1, window_mib=window_mib)
        for _ in range(150):
            state = wanted.state_dict()
            assert given.state_dict() == state
            monkeypatch.setattr(epoch, "_BLOCK", 2**16)
            batch = wanted.next_batch()
            monkeypatch.setattr(epoch, "_BLOCK", 3)
            for other in (given, sampler_of(corpus.index, 45, 1, window_mib=window_mib, state=state)):
                found = other.next_batch().samples
                assert found.name.tolist() == batch.samples.name.tolist()
                assert found.start.tolist() == batch.samples.start.tolist()
