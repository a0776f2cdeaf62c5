from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.arrays import IntArray
from bytescale.common.labels import IGNORE_INDEX
from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import Corpus, prepare_corpus
from bytescale.data.loading.loader import Loader, PrefetchedSteps, StepData
from bytescale.data.order.batches import BatchSampler
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from tests.data.support import memory_corpus, sampler_of, steps_of
from tests.helpers.plans import random_plan
from tests.remote.support import count_tokens, numbered_config, planner_for, write_numbered_corpus

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=25)


def random_planner(num_ranks: int, seed: int) -> Callable[[IntArray], Plan]:
    return lambda lengths: random_plan(lengths.tolist(), num_ranks, seed)


def plan_on_one_rank(lengths: IntArray) -> Plan:
    """Every sequence in a micro-batch of its own."""
    return Plan.build(
        lengths=lengths,
        capacity_tokens=[int(lengths.max())],
        groups=[GroupSpec(sequences=[i], ranks=[0]) for i in range(len(lengths))],
        schedule=[[[i] for i in range(len(lengths))]],
    )


def loader_of(corpus: Corpus, rank: int = 0, planner: Callable = plan_on_one_rank, **settings: int) -> PrefetchedSteps:
    steps = steps_of(corpus, planner, rank, context_length=60, batch_tokens=60, shuffle_seed=7, **settings)
    return PrefetchedSteps(steps)


@given(
    lengths=LENGTHS,
    num_ranks=st.integers(1, 5),
    seed=st.integers(0, 1000),
    over_length=st.sampled_from(["split", "truncate"]),
)
def test_all_ranks_together_read_the_batch_exactly_once(
    lengths: list[int], num_ranks: int, seed: int, over_length: str
) -> None:
    """Tokens are their own places in the corpus: what was read says where it came from."""
    corpus = memory_corpus(lengths, 12, over_length, num_parts=min(2, len(lengths)))
    read: list[list[tuple[int, int, int]]] = [[], []]
    sampler = sampler_of(corpus.index, 60, 7)
    batches = {step: sampler.next_batch() for step in range(2)}
    for rank in range(num_ranks):
        with loader_of(corpus, rank, random_planner(num_ranks, seed), stop_step=2) as loader:
            for data in loader:
                assert data.num_targets == batches[data.step].total_targets
                assert len(data.micro_batches) == len(data.rank_plan.micro_batches)
                for sample, wanted in zip(data.micro_batches, data.rank_plan.micro_batches, strict=True):
                    assert len(sample.tokens) == wanted.num_tokens
                    assert sample.tokens.dtype == sample.labels.dtype == sample.position_ids.dtype == np.int64
                    columns = (sample.tokens.tolist(), sample.labels.tolist(), sample.position_ids.tolist())
                    read[data.step].extend(zip(*columns, strict=True))
    for step, batch in batches.items():
        expected = []
        first = [int(corpus.parts[part][0:1].sum()) for part in range(corpus.index.num_parts)]  # tokens are places
        samples = batch.samples
        columns = samples.part.tolist(), samples.start.tolist(), samples.length.tolist(), samples.num_targets.tolist()
        for part, place, length, targets in zip(*columns, strict=True):
            start = first[part] + place
            for place in range(length):
                label = start + place + 1 if place < targets else IGNORE_INDEX
                expected.append((start + place, label, place))
        assert sorted(read[step]) == sorted(expected)
        assert sum(label != IGNORE_INDEX for _, label, _ in read[step]) == batch.total_targets


@pytest.mark.parametrize("num_ranks", [1, 7, pytest.param(64, marks=pytest.mark.exhaustive)])
def test_planned_ranks_are_given_the_batch_once(tmp_path: Path, num_ranks: int) -> None:
    """Token ids are places in the file, so tokens are counted by where they come from."""
    write_numbered_corpus(tmp_path / "numbers")
    settings = numbered_config(tmp_path)
    corpus = prepare_corpus(settings)
    steps = [next(Loader(corpus, settings, rank).steps(planner_for(num_ranks), 1)) for rank in range(num_ranks)]
    batch = BatchSampler(corpus.index, settings).next_batch()
    ranges = zip(batch.samples.start.tolist(), batch.lengths.tolist(), strict=True)
    assert count_tokens([steps]) == Counter(place for start, length in ranges for place in range(start, start + length))
    labels = sum((own.labels != IGNORE_INDEX).sum() for data in steps for own in data.micro_batches)
    assert labels == batch.total_targets


@given(lengths=LENGTHS, seed=st.integers(0, 100))
def test_batches_do_not_depend_on_the_ranks(lengths: list[int], seed: int) -> None:
    corpus = memory_corpus(lengths, 12)
    samples = []
    for num_ranks in (1, 3):
        with loader_of(corpus, num_ranks - 1, random_planner(num_ranks, seed), stop_step=3) as loader:
            samples.append([data.plan.lengths.tolist() for data in loader])
    assert samples[0] == samples[1]


def test_tokens_lie_in_the_order_of_the_segments() -> None:
    corpus = memory_corpus([8, 3], 10)

    def planner(lengths: IntArray) -> Plan:
        long, short = int(lengths.argmax()), int(lengths.argmin())
        groups = [GroupSpec(sequences=[long], ranks=[1, 0]), GroupSpec(sequences=[short], ranks=[0])]
        return Plan.build(lengths=lengths, capacity_tokens=[9, 9], groups=groups, schedule=[[[0, 1]], [[0]]])

    settings = {"context_length": 11, "batch_tokens": 11, "shuffle_seed": 0}
    (micro_batch,) = next(steps_of(corpus, planner, **settings)).micro_batches
    # Member 1 of 2 holds segments 1 and 2 of the 4 of the long document; then comes the short one, whole.
    assert micro_batch.tokens.tolist() == [2, 3, 4, 5, 8, 9, 10]
    assert micro_batch.labels.tolist() == [3, 4, 5, 6, 9, 10, IGNORE_INDEX]
    assert micro_batch.position_ids.tolist() == [2, 3, 4, 5, 0, 1, 2]


def test_the_state_is_that_of_the_last_consumed_step() -> None:
    corpus = memory_corpus(list(range(1, 40)), 40)
    with loader_of(corpus) as loader:
        uninterrupted = [next(loader) for _ in range(8)]
    with loader_of(corpus) as loader:
        for _ in range(3):
            data = next(loader)
        time.sleep(0.05)  # steps 3 and 4 are read ahead by now; they must come again
    settings = {"context_length": 60, "batch_tokens": 60, "shuffle_seed": 7}
    loader = Loader(corpus, DataConfig(sources=("memory",), **settings), 0)
    loader.load_state_dict(data.sampler_state_after)
    resumed = loader.steps(plan_on_one_rank, None)
    for expected in uninterrupted[3:]:
        assert_same_step(next(resumed), expected)


def assert_same_step(data: StepData, expected: StepData) -> None:
    assert data.step == expected.step
    assert data.rank_plan.digest == expected.rank_plan.digest
    for ours, theirs in zip(data.micro_batches, expected.micro_batches, strict=True):
        assert np.array_equal(ours.tokens, theirs.tokens)
        assert np.array_equal(ours.labels, theirs.labels)


def test_an_error_of_the_planner_comes_out_with_its_traceback_after_the_steps_before_it() -> None:
    corpus = memory_corpus([30] * 10, 30)
    calls = 0

    def planner(lengths: IntArray) -> Plan:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("no plan today")
        return plan_on_one_rank(lengths)

    with loader_of(corpus, planner=planner) as loader:
        assert [next(loader).step for _ in range(2)] == [0, 1]
        with pytest.raises(RuntimeError, match="no plan today") as caught:
            next(loader)
    assert "in planner" in "".join(traceback.format_exception(caught.value))


def test_closing_ends_the_thread_and_the_iteration() -> None:
    before = threading.active_count()
    loader = loader_of(memory_corpus([5] * 10, 10))
    next(loader)
    loader.close()
    loader.close()
    assert threading.active_count() == before
    assert list(loader) == []


def test_waiting_and_planning_are_measured() -> None:
    planned = []

    def slow_planner(lengths: IntArray) -> Plan:
        time.sleep(0.3)
        planned.append(lengths)
        return plan_on_one_rank(lengths)

    with loader_of(memory_corpus([5] * 10, 10), planner=slow_planner) as loader:
        first = next(loader)
        while len(planned) < 3:  # the thread plans the third step when the second is ready
            time.sleep(0.01)
        second = next(loader)
    assert first.times.planning_seconds >= 0.3
    assert first.times.wait_seconds >= 0.2
    assert second.times.wait_seconds < 0.2


def test_prefetching_stays_within_its_depth() -> None:
    made: list[int] = []

    def source() -> Iterator[StepData]:
        for data in steps_of(
            memory_corpus([5] * 10, 10), plan_on_one_rank, stop_step=100, context_length=10, batch_tokens=10
        ):
            made.append(data.step)
            yield data

    steps = PrefetchedSteps(source())
    deadline = time.monotonic() + 60
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 3  # as many as are read ahead, and the one that comes next
    first, *rest = steps
    assert first.times.steps_ready == 3
    assert [data.step for data in rest] == list(range(1, 100))
    assert rest[-1].times.steps_ready <= 3
    with pytest.raises(StopIteration):
        next(steps)
