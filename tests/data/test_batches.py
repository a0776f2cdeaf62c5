from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.errors import CheckpointError, ConfigError
from bytescale.config.schema import DataConfig
from bytescale.data.order.batches import BatchSampler, GlobalBatch
from bytescale.data.order.epoch import epoch_order
from tests.data.support import memory_corpus, sampler_of

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=40)


def batches_slowly(lengths: list[int], budget: int, seed: int, count: int) -> list[list[int]]:
    """The obvious twin: one sample at a time, into the batch while it fits."""
    batches: list[list[int]] = [[]]
    epoch = used = 0
    while True:
        for sample in epoch_order(len(lengths), seed, epoch).tolist():
            if used + lengths[sample] > budget:
                if len(batches) == count:
                    return batches
                batches.append([])
                used = 0
            batches[-1].append(sample)
            used += lengths[sample]
        epoch += 1


def same(a: GlobalBatch, b: GlobalBatch) -> bool:
    return (a.step, a.epoch) == (b.step, b.epoch) and np.array_equal(a.samples.name, b.samples.name)


@given(lengths=LENGTHS, extra=st.integers(0, 100), seed=st.integers(0, 5))
def test_batches_are_those_of_the_obvious_way(lengths: list[int], extra: int, seed: int) -> None:
    budget = max(lengths) + extra + 1
    sampler = sampler_of(memory_corpus(lengths, 20).index, budget, seed)
    batches = [sampler.next_batch() for _ in range(12)]
    assert [batch.samples.name.tolist() for batch in batches] == batches_slowly(lengths, budget, seed, 12)
    for step, batch in enumerate(batches):
        assert batch.step == step
        assert batch.lengths.dtype == np.int64
        assert 0 < batch.num_tokens <= budget
        assert batch.total_targets == batch.num_tokens - len(batch.samples)  # no document is split here


@given(lengths=LENGTHS, extra=st.integers(0, 30))
def test_every_epoch_consumes_every_sample_exactly_once(lengths: list[int], extra: int) -> None:
    corpus = memory_corpus(lengths, 7)
    sampler = sampler_of(corpus.index, 7 + extra, shuffle_seed=3)
    num_samples = len(corpus.samples)
    stream: list[int] = []
    while len(stream) < 3 * num_samples:
        batch = sampler.next_batch()
        assert batch.epoch == len(stream) // num_samples
        stream.extend(batch.samples.name.tolist())
    for epoch in range(3):
        assert sorted(stream[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))


@given(lengths=LENGTHS, stop=st.integers(0, 8))
def test_resuming_at_any_step_gives_what_was_never_stopped(lengths: list[int], stop: int) -> None:
    corpus = memory_corpus(lengths, 20)
    uninterrupted = sampler_of(corpus.index, 25, shuffle_seed=1)
    expected = [uninterrupted.next_batch() for _ in range(stop + 5)]
    first = sampler_of(corpus.index, 25, shuffle_seed=1)
    for _ in range(stop):
        first.next_batch()
    state = json.loads(json.dumps(first.state_dict()))
    second = sampler_of(corpus.index, 25, shuffle_seed=1)
    second.load_state_dict(state)
    assert second.next_step == stop
    assert all(same(second.next_batch(), batch) for batch in expected[stop:])


def test_resuming_with_another_budget_repeats_and_skips_nothing() -> None:
    corpus = memory_corpus(list(range(1, 30)), 30)
    first = sampler_of(corpus.index, 40, shuffle_seed=1)
    seen = [first.next_batch().samples.name for _ in range(4)]
    second = sampler_of(corpus.index, 100, shuffle_seed=1)
    second.load_state_dict(first.state_dict())
    while sum(map(len, seen)) < 29:
        seen.append(second.next_batch().samples.name)
    assert sorted(np.concatenate(seen)[:29].tolist()) == list(range(29))


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    orders = {tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)
    # Written down, because a resumed run must find the order of the run that it resumes, whatever has been upgraded.
    assert epoch_order(8, 1234, 0).tolist() == [5, 6, 3, 7, 4, 1, 2, 0]


def test_a_million_samples_take_no_loop() -> None:
    lengths = np.random.default_rng(0).integers(1, 16, 1_000_000).tolist()
    sampler = sampler_of(memory_corpus(lengths, 16).index, 2**20, shuffle_seed=0)
    batches = [sampler.next_batch() for _ in range(7)]
    assert all(2**20 - 16 < batch.num_tokens <= 2**20 for batch in batches)
    assert len(np.unique(np.concatenate([batch.samples.name for batch in batches]))) > 900_000


def test_a_corpus_smaller_than_a_batch_is_read_several_times() -> None:
    batch = sampler_of(memory_corpus([3, 4], 10).index, 15, shuffle_seed=0).next_batch()
    assert batch.num_tokens == 14
    assert sorted(batch.samples.name.tolist()) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_tokens": 8}, r"data.batch_tokens = 8 is smaller than data.context_length = 10"),
        ({"shuffle_seed": -1}, r"data.shuffle_seed is -1"),
    ],
)
def test_settings_by_which_nothing_can_be_drawn(settings: dict, message: str) -> None:
    config = DataConfig(sources=("memory",), context_length=10, **settings)
    with pytest.raises(ConfigError, match=message):
        BatchSampler(memory_corpus([3, 9, 4], 10).index, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"corpus": "another"}, r"made with data corpus another, this run has"),
        ({"shuffle_seed": 2}, r"made with data shuffle_seed 2, this run has 1"),
        ({"position": 3}, r"position 3 lies outside the corpus \(3 sequences\)"),
    ],
)
def test_a_state_that_does_not_belong_here(change: dict, message: str) -> None:
    sampler = sampler_of(memory_corpus([3, 9, 4], 10).index, 20, shuffle_seed=1)
    with pytest.raises(CheckpointError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})
