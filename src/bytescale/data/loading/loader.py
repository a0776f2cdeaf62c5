"""The local loader. It draws global batches, plans them and reads this rank's slices, some steps ahead of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.config.schema import DataConfig, LossPer
from bytescale.data.loading.corpus import IGNORE_INDEX, Corpus
from bytescale.data.loading.prefetch import Prefetcher
from bytescale.data.order.batches import BatchSampler, GlobalBatch, SamplerState, make_sampler
from bytescale.data.order.index import CorpusFacts
from bytescale.data.tokens.fields import WEIGHTS
from bytescale.plan.plan import Plan, Planner, costs_of_step, plan_with_costs
from bytescale.plan.rank_plan import MicroBatch, RankPlan
from bytescale.plan.summary import PlanSummary

__all__ = [
    "IGNORE_INDEX",
    "Feed",
    "Loader",
    "LocalFeed",
    "LocalLoader",
    "MicroBatchData",
    "Reader",
    "StepData",
    "read_micro_batch",
    "weighted_labels",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchData:
    """The tokens of one micro-batch of one rank, in the order of its segments. Letters: T tokens, P segments."""

    tokens: IntArray  # [T] token ids
    labels: IntArray  # [T] next token of the same document, or what its record names; or IGNORE_INDEX
    position_ids: IntArray  # [T] place inside the sequence
    segment_pieces: IntArray  # [P] name of the sample that each segment is cut from (CorpusIndex.pieces_of)
    weights: NDArray[np.float64] | None = None  # [T] of each label's loss, scaled as data.loss_per says; None: all 1
    fields: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """``[T]`` by name, those of ``data.fields``: the number of the token that each label stands for, 0 without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTimes:
    """What the data of one step cost on one rank: seconds and bytes."""

    planning_seconds: float
    """Time to plan and verify the global batch."""
    reading_seconds: float
    """Time from the finished plan to the finished slices."""
    wait_seconds: float = 0.0
    """How long training waited for the step."""
    bytes_read: int = 0
    """Bytes of the corpus that were read for this rank's slices."""
    bytes_received: int = 0
    """Bytes that this rank received from planner and servers; 0 under the local loader."""
    steps_ready: int = 0
    """Finished steps that were waiting when training asked for this one."""
    steps_planned: int = 0
    """Plans that the planner held beyond this step."""
    restarts: int = 0
    """Restarts of servers and planners that this rank has noticed so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """What one rank needs for one step."""

    step: int
    num_targets: int
    """Labels in the GLOBAL batch that are trained on."""
    loss_divisor: float
    """What the sum of weighted losses of the GLOBAL batch is divided by (``data.loss_per``)."""
    summary: PlanSummary
    plan: Plan | None
    """The whole plan, or None if this rank has only its part. Under the remote loader only the first rank has it."""
    rank_plan: RankPlan
    micro_batches: tuple[MicroBatchData, ...]
    """One per micro-batch of ``rank_plan``. A rank may have none."""
    sampler_state_after: SamplerState
    """Where the next step starts."""
    times: LoaderTimes


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One of the processes that read a corpus together."""

    hdp_rank: int
    """HDP rank whose slices are read. With tensor or pipeline parallelism, several processes have the same."""
    num_processes: int
    is_first: bool
    """Whether this process starts the servers of the remote loader."""
    tell: Callable[[list[Any]], None]
    """Replaces the items of a list by those of the first process. Every process calls it."""


class Loader(Protocol):
    """Iterates over the steps of one rank, in a ``with`` block."""

    def __enter__(self) -> Iterator[StepData]: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Feed(Protocol):
    """A corpus and a position in its order, from which steps can be loaded. The trainer knows no more of the data."""

    @property
    def facts(self) -> CorpusFacts:
        """Summary of the corpus."""
        ...

    def state_dict(self) -> SamplerState:
        """Where the first step of ``open`` starts."""
        ...

    def load_state_dict(self, state: SamplerState) -> None:
        """Go to ``state``. Raises ``CheckpointError`` when it belongs to other data."""
        ...

    def open(self, planner: Planner, stop_step: int | None) -> Loader:
        """Load steps from the current position on, up to the one before ``stop_step``; None: without an end."""
        ...

    def close(self) -> None:
        """End the threads or actors that the feed started."""
        ...


class LocalFeed:
    """Reads the corpus in this process."""

    def __init__(self, corpus: Corpus, config: DataConfig, rank: int) -> None:
        """Start at the first batch."""
        self._corpus = corpus
        self._config = config
        self._sampler: BatchSampler | None = None  # made when it is first needed
        self._rank = rank
        self._prefetch_steps = config.prefetch_steps

    @property
    def facts(self) -> CorpusFacts:
        return self._corpus.facts

    def state_dict(self) -> SamplerState:
        return self._started().state_dict()

    def load_state_dict(self, state: SamplerState) -> None:
        self._sampler = make_sampler(self._corpus.index, self._config, state)

    def open(self, planner: Planner, stop_step: int | None) -> LocalLoader:
        return LocalLoader(
            self._corpus,
            self._started(),
            planner,
            self._rank,
            self._prefetch_steps,
            stop_step=stop_step,
            loss_per=self._config.loss_per,
        )

    def _started(self) -> BatchSampler:
        """Return the sampler, made now if this is the first call. Raises as ``make_sampler``."""
        self._sampler = self._sampler or make_sampler(self._corpus.index, self._config)
        return self._sampler

    def close(self) -> None:
        """End the threads that tokenise in the background."""
        self._corpus.close()


def read_micro_batch(
    corpus: Corpus, batch: GlobalBatch, micro_batch: MicroBatch, loss_per: LossPer = "token"
) -> MicroBatchData:
    """Read the segments of ``micro_batch``, and the one token behind each, which is its last label."""
    sequences = micro_batch.segment_sequences
    ranges = (batch.pieces[sequences], micro_batch.segment_starts, micro_batch.segment_stops)
    tokens, labels = corpus.read(*ranges)
    fields = corpus.read_fields(*ranges, names=corpus.loaded_fields)
    scales, counts = batch.scaling(loss_per).scales[sequences], micro_batch.segment_stops - micro_batch.segment_starts
    labels, weights = weighted_labels(labels, fields.pop(WEIGHTS, None), scales, counts)
    return MicroBatchData(
        tokens=tokens,
        labels=labels,
        position_ids=micro_batch.position_ids(),
        segment_pieces=ranges[0],
        weights=weights,
        fields=fields,
    )


def weighted_labels(
    labels: IntArray, weights: NDArray[np.float32] | None, scales: NDArray[np.float64], counts: IntArray
) -> tuple[IntArray, NDArray[np.float64] | None]:
    """Return the labels without those of weight 0, and the weights of their losses; None if all are 1.

    Args:
        labels: ``[T]`` next tokens, or ``IGNORE_INDEX``.
        weights: ``[T]`` of each label; None: all are 1.
        scales: ``[P]`` factor of each segment's weights (``LossScaling``).
        counts: ``[P]`` tokens of each segment.
    """
    if weights is None and (scales == 1).all():
        return labels, None
    if weights is None:
        return labels, np.repeat(scales, counts)
    scaled = weights.astype(np.float64) * np.repeat(scales, counts)
    return np.where(weights == 0, IGNORE_INDEX, labels), scaled


class PrefetchedSteps:
    """Iterates over the steps of one rank. A thread makes them, up to ``prefetch_steps`` steps ahead of training.

    Use it in a ``with`` block, or call ``close``.
    """

    def __init__(self, steps: Iterator[StepData], prefetch_steps: int, name: str) -> None:
        """Start the thread ``name``, which runs ``steps``. ``prefetch_steps``: steps that may wait, at least 1."""
        self._steps = Prefetcher(steps, prefetch_steps, name=name)

    def __iter__(self) -> Iterator[StepData]:
        return self

    def __next__(self) -> StepData:
        """Return the next step. An error of the thread is raised when the turn of its step comes."""
        started, ready = time.perf_counter(), self._steps.num_ready
        data = next(self._steps)
        waited = time.perf_counter() - started
        return replace(data, times=replace(data.times, wait_seconds=waited, steps_ready=ready))

    def close(self) -> None:
        """End the thread. Steps that were made ahead are dropped, which loses nothing: no state counts them."""
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LocalLoader(PrefetchedSteps):
    """Reads the steps of one rank. Every rank draws and plans the same batches and reads its own slices.

    Nobody else may use the sampler. The state for a checkpoint is the ``state_dict`` of the loader: it counts the steps
    that were consumed, not those that were read ahead.
    """

    def __init__(
        self,
        corpus: Corpus,
        sampler: BatchSampler,
        planner: Planner,
        rank: int,
        prefetch_steps: int,
        *,
        stop_step: int | None = None,
        loss_per: LossPer = "token",
    ) -> None:
        """Start reading at the sampler's state.

        Args:
            corpus: the corpus that the sampler draws from.
            sampler: the sampler, positioned at the first step wanted.
            planner: the same on every rank.
            rank: HDP rank whose slices are read.
            prefetch_steps: finished steps that may wait, at least 1.
            stop_step: the iteration ends before the step of this number; None: it has no end.
            loss_per: see ``data.loss_per``.
        """
        self._corpus = corpus
        self._loss_per = loss_per
        self._sampler = sampler
        self._planner = planner
        self._rank = rank
        self._stop_step = stop_step
        self._state = sampler.state_dict()
        self._token_bytes = corpus.index.token_bytes
        super().__init__(self._read_steps(), prefetch_steps, name="bytescale-loader")

    def __next__(self) -> StepData:
        data = super().__next__()
        self._state = data.sampler_state_after
        return data

    def state_dict(self) -> SamplerState:
        """Return where the step after the last consumed one starts, for ``BatchSampler.load_state_dict``."""
        return dict(self._state)

    def _read_steps(self) -> Iterator[StepData]:
        while self._stop_step is None or self._sampler.next_step < self._stop_step:
            batch = self._sampler.next_batch()
            started = time.perf_counter()
            plan = plan_with_costs(self._planner, batch.lengths, costs_of_step(self._planner, batch.step))
            rank_plan = RankPlan.of(plan, self._rank)
            planned = time.perf_counter()
            micro_batches = tuple(
                read_micro_batch(self._corpus, batch, micro_batch, self._loss_per)
                for micro_batch in rank_plan.micro_batches
            )
            num_tokens = sum(len(micro_batch.tokens) for micro_batch in micro_batches)
            yield StepData(
                step=batch.step,
                num_targets=batch.total_targets,
                loss_divisor=batch.scaling(self._loss_per).divisor,
                summary=PlanSummary.of(plan),
                plan=plan,
                rank_plan=rank_plan,
                micro_batches=micro_batches,
                sampler_state_after=self._sampler.state_dict(),
                times=LoaderTimes(
                    planning_seconds=planned - started,
                    reading_seconds=time.perf_counter() - planned,
                    bytes_read=num_tokens * self._token_bytes,
                ),
            )
