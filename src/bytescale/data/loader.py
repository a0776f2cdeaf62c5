"""The local loader: draws global batches, plans them and reads this rank's slices, some steps ahead of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from bytescale.data.batches import BatchSampler, GlobalBatch, SamplerState
from bytescale.data.corpus import IGNORE_INDEX, Corpus
from bytescale.data.prefetch import Prefetcher
from bytescale.plan.plan import Plan
from bytescale.plan.rank_plan import MicroBatch, RankPlan

IntArray = NDArray[np.int64]

__all__ = ["IGNORE_INDEX", "LocalLoader", "MicroBatchData", "StepData", "read_micro_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchData:
    """The tokens of one micro-batch of one rank, in the order of its segments. Shape letter: T tokens."""

    tokens: IntArray  # [T] token ids
    labels: IntArray  # [T] next token of the same document, or IGNORE_INDEX
    position_ids: IntArray  # [T] place inside the sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """What one rank needs for one step."""

    step: int
    batch: GlobalBatch
    plan: Plan
    rank_plan: RankPlan
    micro_batches: tuple[MicroBatchData, ...]
    """One per micro-batch of ``rank_plan``; may be none."""
    sampler_state_after: SamplerState
    """Where the next step starts."""
    planning_seconds: float
    reading_seconds: float
    wait_seconds: float = 0.0
    """How long the consumer waited for this step."""


def read_micro_batch(corpus: Corpus, batch: GlobalBatch, micro_batch: MicroBatch) -> MicroBatchData:
    """Read exactly the segments of ``micro_batch`` (and the one token after each, for its last label)."""
    tokens, labels = corpus.read(
        batch.pieces[micro_batch.segment_sequences], micro_batch.segment_starts, micro_batch.segment_stops
    )
    return MicroBatchData(tokens=tokens, labels=labels, position_ids=micro_batch.position_ids())


class LocalLoader:
    """Iterates over the steps of one rank. Every rank draws and plans the same batches and reads its own slices.

    A thread works up to ``prefetch_steps`` steps ahead. The sampler belongs to it from here on: the state for a
    checkpoint is ``state_dict`` of the loader, which counts the steps that were consumed and not those read ahead.
    Use it in a ``with`` block, or call ``close``.
    """

    def __init__(
        self,
        corpus: Corpus,
        sampler: BatchSampler,
        planner: Callable[[IntArray], Plan],
        rank: int,
        prefetch_steps: int,
        *,
        stop_step: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start reading at the sampler's state.

        Args:
            corpus: what the sampler draws from.
            sampler: positioned at the first step wanted.
            planner: from lengths int64 ``[S]`` to a plan; the same on every rank.
            rank: HDP rank whose slices are read.
            prefetch_steps: finished steps that may wait, at least 1.
            stop_step: number of the step before which the iteration ends; None: never.
            clock: seconds.
        """
        self._corpus = corpus
        self._sampler = sampler
        self._planner = planner
        self._rank = rank
        self._stop_step = stop_step
        self._clock = clock
        self._state = sampler.state_dict()
        self._steps = Prefetcher(self._read_steps(), prefetch_steps, name="bytescale-loader")

    def __iter__(self) -> Iterator[StepData]:
        return self

    def __next__(self) -> StepData:
        """The next step. What sampling, planning or reading raised in the thread is raised here, traceback included."""
        started = self._clock()
        data = next(self._steps)
        self._state = data.sampler_state_after
        return replace(data, wait_seconds=self._clock() - started)

    def state_dict(self) -> SamplerState:
        """Where the step after the last consumed one starts: for ``BatchSampler.load_state_dict``."""
        return dict(self._state)

    def close(self) -> None:
        """End the thread; steps read ahead are dropped, and nothing is lost by it."""
        self._steps.close()

    def __enter__(self) -> LocalLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_steps(self) -> Iterator[StepData]:
        while self._stop_step is None or self._sampler.next_step < self._stop_step:
            batch = self._sampler.next_batch()
            started = self._clock()
            plan = self._planner(batch.lengths)
            rank_plan = RankPlan.of(plan, self._rank)
            planned = self._clock()
            micro_batches = tuple(
                read_micro_batch(self._corpus, batch, micro_batch) for micro_batch in rank_plan.micro_batches
            )
            yield StepData(
                step=batch.step,
                batch=batch,
                plan=plan,
                rank_plan=rank_plan,
                micro_batches=micro_batches,
                sampler_state_after=self._sampler.state_dict(),
                planning_seconds=planned - started,
                reading_seconds=self._clock() - planned,
            )
