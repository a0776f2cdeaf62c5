"""Sources mixed by weights, and documents filtered by length."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bytescale.common.errors import CheckpointError, ConfigError, DataError
from bytescale.config.schema import Config, DataConfig
from bytescale.config.validate import validate
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.order.batches import BatchSampler
from bytescale.data.order.epoch import epoch_order
from bytescale.data.tokens import shards
from tests.data.support import config, write_jsonl


@pytest.fixture
def settings(tmp_path: Path) -> DataConfig:
    """60 short documents and 12 long ones."""
    write_jsonl(tmp_path / "short.jsonl", [{"text": f"{n:03d}" * (n % 5 + 1)} for n in range(60)])
    write_jsonl(tmp_path / "long.jsonl", [{"text": f"{n:03d}" * 60} for n in range(12)])
    sources = (tmp_path / "short.jsonl", tmp_path / "long.jsonl")
    return config(tmp_path, *sources, weights=(0.25, 0.75), batch_tokens=500, context_length=100)


def test_shares_follow_the_weights_and_every_epoch_is_its_source_once(settings: DataConfig) -> None:
    corpus = prepare_corpus(settings)
    sampler = BatchSampler(corpus.index, settings)
    of_sample = corpus.index.part_sources[corpus.samples.part]
    drawn: list[int] = []
    for step in range(40):
        batch = sampler.next_batch()
        assert batch.step == step
        assert 400 < batch.num_tokens <= 500
        drawn.extend(np.searchsorted(corpus.samples.name, batch.samples.name).tolist())
        tokens = np.bincount(of_sample[drawn], weights=corpus.samples.length[drawn])
        assert abs(tokens[0] - 0.25 * tokens.sum()) <= 2 * 100
    # Each source on its own passes through its epochs in the order of (seed, epoch, source).
    for source in (0, 1):
        own = np.flatnonzero(of_sample == source)
        passed = np.array([sample for sample in drawn if of_sample[sample] == source])
        assert len(passed) > len(own)
        expected = np.concatenate([own[epoch_order(len(own), 1234, epoch, source)] for epoch in range(20)])
        assert np.array_equal(passed, expected[: len(passed)])
        assert set(Counter(passed[: len(own)].tolist()).values()) == {1}


def test_a_mixture_goes_on_from_its_state(settings: DataConfig) -> None:
    corpus = prepare_corpus(settings)
    sampler = BatchSampler(corpus.index, settings)
    for _ in range(7):
        sampler.next_batch()
    state = sampler.state_dict()
    expected = [sampler.next_batch().samples.name.tolist() for _ in range(20)]
    resumed = BatchSampler(corpus.index, settings)
    resumed.load_state_dict(state)
    assert [resumed.next_batch().samples.name.tolist() for _ in range(20)] == expected
    other = BatchSampler(corpus.index, replace(settings, weights=(0.5, 0.5)))
    with pytest.raises(CheckpointError, match=r"data weights \[0.25, 0.75\], this run has \[0.5, 0.5\]"):
        other.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"data weights \[0.25, 0.75\], this run has None"):
        BatchSampler(corpus.index, replace(settings, weights=())).load_state_dict(state)


def test_a_mixture_of_a_large_source_and_a_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The large one goes window by window, the small one in one shuffle; each is its source once an epoch."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 200 * 1024)
    (tmp_path / "large").mkdir()
    for number in range(8):
        records = [{"text": f"{number}{n:03d} " * (40 + n % 90)} for n in range(600)]
        write_jsonl(tmp_path / "large" / f"{number}.jsonl", records)
    write_jsonl(tmp_path / "small.jsonl", [{"text": f"{n:03d}" * 20} for n in range(50)])
    settings = config(
        tmp_path,
        *(tmp_path / "large", tmp_path / "small.jsonl"),
        weights=(0.9, 0.1),
        batch_tokens=100_000,
        context_length=1000,
        shuffle_window_mib=1,
    )
    corpus = prepare_corpus(settings)
    sampler = BatchSampler(corpus.index, settings)
    batches: list[list[int]] = []
    states = [sampler.state_dict()]
    while states[-1]["sources"][0]["epoch"] == 0:
        batches.append(sampler.next_batch().samples.name.tolist())
        states.append(sampler.state_dict())
    drawn = [sample for batch in batches for sample in batch]
    assert {state["sources"][0]["window"] for state in states} == {0, 1}
    assert {state["sources"][1]["window"] for state in states} == {0}
    assert states[-1]["sources"][1]["epoch"] > 1
    source = corpus.index.part_sources
    for number in (0, 1):
        own = [sample for sample in corpus.samples.name.tolist() if source[sample >> 32] == number]
        passed = [sample for sample in drawn if source[sample >> 32] == number]
        assert len(passed) > len(own)
        for epoch in range(len(passed) // len(own)):
            assert sorted(passed[epoch * len(own) : (epoch + 1) * len(own)]) == own
    middle = len(batches) // 2
    resumed = BatchSampler(corpus.index, settings, states[middle])
    assert [resumed.next_batch().samples.name.tolist() for _ in batches[middle:]] == batches[middle:]
    with pytest.raises(CheckpointError, match="data shuffle_window 1 MiB, this run has everything"):
        BatchSampler(corpus.index, replace(settings, shuffle_window_mib=2), states[middle])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((0.5, 0.4), r"data.weights are 0.5, 0.4, with the sum 0.9"),
        ((1.5, -0.5), r"data.weights are 1.5, -0.5, with the sum 1"),
        ((1.0,), r"data.weights has 1 numbers for 2 sources"),
    ],
)
def test_weights_that_make_no_sense(settings: DataConfig, weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(Config(data=replace(settings, weights=weights)))


def test_a_source_that_gives_nothing(tmp_path: Path, settings: DataConfig) -> None:
    filtered = replace(settings, context_length=100, over_length="drop")  # every long document
    with pytest.raises(DataError, match=r"long.jsonl' has weight 0.75 but holds no sequence.*data.over_length"):
        BatchSampler(prepare_corpus(filtered).index, filtered)
