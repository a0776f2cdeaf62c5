"""The order of a corpus that is read window by window, and what has to be read for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.errors import CheckpointError, DataError
from bytescale.data.loading.corpus import Corpus
from bytescale.data.order.batches import GlobalBatch
from bytescale.data.order.epoch import MIB, SampleStream, epoch_order
from bytescale.data.tokens.shards import PartContent
from tests.data.support import PartsAtHand, memory_corpus, read_whole, sampler_of

LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(any)


class WatchedParts(PartsAtHand):
    """Notes what is asked of it."""

    def __init__(self, contents: Sequence[PartContent]) -> None:
        super().__init__(contents)
        self.expected: list[int] = []
        self.found: list[int] = []

    def expect(self, parts: Sequence[int]) -> None:
        self.expected.extend(parts)

    def find(self, parts: Sequence[int]) -> list[PartContent]:
        self.found.extend(parts)
        return super().find(parts)


def later(lengths: list[int], num_parts: int) -> tuple[Corpus, WatchedParts]:
    """A corpus of 4 MiB of text a part of which nothing has been read yet."""
    made: list[WatchedParts] = []

    def finder(contents: list[PartContent]) -> WatchedParts:
        made.append(WatchedParts(contents))
        return made[0]

    corpus = memory_corpus(lengths, 20, num_parts=num_parts, part_mib=4, finder=finder, text_later=True)
    return corpus, made[0]


def batches(corpus: Corpus, count: int, window_mib: int, state: dict | None = None) -> list[GlobalBatch]:
    sampler = sampler_of(corpus.index, 25, 1, window_mib=window_mib, state=state)
    return [sampler.next_batch() for _ in range(count)]


def names(drawn: Sequence[GlobalBatch]) -> list[list[int]]:
    return [batch.samples.name.tolist() for batch in drawn]


@given(lengths=LENGTHS, num_parts=st.integers(1, 7), window_mib=st.integers(1, 30), epoch=st.integers(0, 3))
def test_the_windows_of_an_epoch_are_all_parts_once(
    lengths: list[int], num_parts: int, window_mib: int, epoch: int
) -> None:
    corpus = memory_corpus(lengths, 20, num_parts=min(num_parts, len(lengths)), part_mib=4)
    stream = SampleStream(corpus.index, np.arange(corpus.index.num_parts), window_mib, seed=3)
    windows = stream.windows(epoch)
    assert sorted(np.concatenate(windows).tolist()) == list(range(corpus.index.num_parts))
    sizes = [int(corpus.index.part_bytes[window].sum()) for window in windows]
    assert len(windows) == 1 or min(sizes) > 0
    assert max(sizes) < 1.5 * window_mib * MIB + 4 * MIB  # a part more, or half a window that would be left over
    assert (len(windows) == 1) or sum(sizes) > window_mib * MIB
    if len(windows) > 1:
        orders = {str(stream.windows(other)) for other in range(20)}
        assert len(orders) > 1 or num_parts == 2


@given(lengths=LENGTHS, num_parts=st.integers(1, 7), window_mib=st.integers(1, 30))
def test_every_epoch_is_every_sample_once_window_by_window(lengths: list[int], num_parts: int, window_mib: int) -> None:
    """Against the slow way: windows one after the other, each in the order of its own draws."""
    corpus = memory_corpus(lengths, 20, num_parts=min(num_parts, len(lengths)), part_mib=4)
    stream = SampleStream(corpus.index, np.arange(corpus.index.num_parts), window_mib, seed=1)
    expected: list[int] = []
    for epoch in range(3):
        windows = stream.windows(epoch)
        for number, parts in enumerate(windows):
            samples = [sample for sample in corpus.samples.name.tolist() if sample >> 32 in parts]
            draws = (3, number) if stream.is_windowed else ()
            expected.extend(samples[place] for place in epoch_order(len(samples), 1, epoch, *draws))
    drawn: list[int] = []
    sampler = sampler_of(corpus.index, 25, 1, window_mib=window_mib)
    while len(drawn) < len(expected):
        drawn.extend(sampler.next_batch().samples.name.tolist())
    assert drawn[: len(expected)] == expected
    assert set(Counter(expected).values()) == {3}


@given(lengths=LENGTHS, num_parts=st.integers(1, 7), window_mib=st.integers(1, 30), stop=st.integers(0, 9))
def test_the_order_does_not_depend_on_what_was_read_when(
    lengths: list[int], num_parts: int, window_mib: int, stop: int
) -> None:
    """Read all at once, as needed, or as needed from the middle on: the same batches, and the same states."""
    num_parts = min(num_parts, len(lengths))
    at_once = memory_corpus(lengths, 20, num_parts=num_parts, part_mib=4)
    as_needed, _ = later(lengths, num_parts)
    assert as_needed.index.fingerprint == at_once.index.fingerprint
    wanted = batches(at_once, stop + 8, window_mib)
    given_batches = batches(as_needed, stop + 8, window_mib)
    assert names(given_batches) == names(wanted)
    first = sampler_of(as_needed.index, 25, 1, window_mib=window_mib)
    for _ in range(stop):
        first.next_batch()
    resumed, _ = later(lengths, num_parts)
    rest = batches(resumed, 8, window_mib, first.state_dict())
    assert names(rest) == names(wanted[stop:])
    for mine, other in zip([*given_batches, *rest], [*wanted, *wanted[stop:]], strict=True):
        assert (mine.step, mine.epoch) == (other.step, other.epoch)
        assert mine.lengths.tolist() == other.lengths.tolist()
        assert mine.samples.num_targets.tolist() == other.samples.num_targets.tolist()
    # The tokens too, whatever was read first.
    for corpus, batch in ((as_needed, given_batches[-1]), (resumed, rest[-1])):
        tokens, labels = read_whole(corpus, batch.samples.name)
        same = read_whole(at_once, batch.samples.name)
        assert np.array_equal(tokens, same[0])
        assert np.array_equal(labels, same[1])


def test_only_the_window_is_read_and_the_next_one_expected() -> None:
    corpus, parts = later([5] * 40, num_parts=8)
    sampler = sampler_of(corpus.index, 25, 1, window_mib=8)
    windows = SampleStream(corpus.index, np.arange(8), 8, 1).windows(0)
    assert [len(window) for window in windows] == [2, 2, 2, 2]
    assert parts.found == windows[0].tolist()
    assert parts.expected == windows[1].tolist()
    assert corpus.index.metadata.num_parts_read == 2
    assert corpus.index.metadata.counts.num_tokens == 50
    sampler.next_batch()  # 5 of the 10 samples
    assert parts.found == windows[0].tolist()
    sampler.next_batch()
    assert parts.found == [*windows[0], *windows[1]]
    state = sampler.state_dict()
    for _ in range(6):
        sampler.next_batch()
    assert parts.found[:8] == [part for window in windows for part in window]
    assert corpus.metadata.is_complete
    # A run that goes on in the second window reads that one alone.
    corpus, parts = later([5] * 40, num_parts=8)
    sampler_of(corpus.index, 25, 1, window_mib=8, state=state)
    assert parts.found == windows[1].tolist()


@given(
    text=st.lists(st.integers(0, 9), min_size=4, max_size=30).filter(any),
    bins=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    part_mib=st.sampled_from([4, 2**30]),
)
def test_samples_of_bins_are_dealt_to_the_windows(text: list[int], bins: list[int], part_mib: int) -> None:
    """All of them once an epoch, about as many to a window as its share of the text; also of petabytes of it."""
    corpus = memory_corpus([*text, *bins], 20, num_parts=4, part_mib=part_mib, num_bins=1)
    of_bins = set(corpus.index.load([4])[:].name.tolist())
    stream = SampleStream(corpus.index, np.arange(5), window_mib=2 * part_mib, seed=1)
    for epoch in range(2):
        seen: list[int] = []
        for window, parts in enumerate(stream.windows(epoch)):
            wanted = corpus.index.load(parts.tolist())[:].name
            stream._load(epoch, window, stream.windows(epoch))
            own = set(stream.samples[:].name.tolist()) & of_bins
            assert set(stream.samples[:].name.tolist()) == set(wanted.tolist()) | own
            assert abs(len(own) - len(of_bins) * len(parts) / 4) <= 1
            seen.extend(own)
        assert len(stream.windows(epoch)) == 2
        assert sorted(seen) == sorted(of_bins)


@given(seed=st.integers(0, 30), place=st.integers(0, 5))
def test_one_part_that_holds_anything_is_found_wherever_it_comes(seed: int, place: int) -> None:
    lengths = [3 if part == place else 0 for part in range(6)]
    corpus = memory_corpus(lengths, 20, num_parts=6, part_mib=4)
    sampler = sampler_of(corpus.index, 3, seed, window_mib=4)
    assert [sampler.next_batch().samples.name.tolist() for _ in range(5)] == [[place << 32]] * 5


def test_windows_without_a_sample_are_passed_over() -> None:
    corpus = memory_corpus([0, 0, 3, 0, 0, 4], 20, num_parts=6, part_mib=4)
    drawn = np.concatenate([batch.samples.name for batch in batches(corpus, 4, window_mib=4)])
    assert Counter(drawn.tolist()).keys() == set(corpus.samples.name.tolist())


def test_a_corpus_of_which_nothing_is_left_is_found_out_when_all_was_read() -> None:
    corpus, parts = later([0] * 6, num_parts=6)
    with pytest.raises(DataError, match=r"corpus is empty"):
        sampler_of(corpus.index, 25, 1, window_mib=4)
    assert sorted(parts.found) == list(range(6))


def test_a_state_of_other_texts_or_another_window() -> None:
    lengths = list(range(1, 20))
    corpus = memory_corpus(lengths, 20, num_parts=5, part_mib=4)
    sampler = sampler_of(corpus.index, 25, 1, window_mib=8)
    for _ in range(3):
        sampler.next_batch()
    state = sampler.state_dict()
    other = memory_corpus(lengths[::-1], 20, num_parts=5, part_mib=4)  # files of the same sizes
    assert other.index.fingerprint == corpus.index.fingerprint
    with pytest.raises(CheckpointError, match=r"made with other texts: their content was \w+ and is now \w+"):
        sampler_of(other.index, 25, 1, window_mib=8, state=state)
    with pytest.raises(CheckpointError, match=r"data shuffle_window 8 MiB, this run has 4 MiB"):
        sampler_of(corpus.index, 25, 1, window_mib=4, state=state)
    with pytest.raises(CheckpointError, match=r"data shuffle_window 8 MiB, this run has everything"):
        sampler_of(corpus.index, 25, 1, window_mib=64, state=state)
    with pytest.raises(CheckpointError, match=r"window 7 lies outside the corpus \(3 windows\)"):
        sampler_of(corpus.index, 25, 1, window_mib=8, state={**state, "window": 7})
    # Where all fits in one window, its size does not matter.
    whole = sampler_of(corpus.index, 25, 1, window_mib=64).state_dict()
    assert sampler_of(corpus.index, 25, 1, window_mib=4000, state=whole).state_dict() == whole
