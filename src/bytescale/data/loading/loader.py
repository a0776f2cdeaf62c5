"""Steps of one rank, made some steps ahead of training, and the loader that reads all of them in this process."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

from bytescale.config.schema import DataConfig, LossPer
from bytescale.data.loading.assemble import MicroBatchData, Segments
from bytescale.data.loading.corpus import Corpus
from bytescale.data.order.batches import BatchSampler, GlobalBatch, SamplerState
from bytescale.data.order.index import CorpusMetadata
from bytescale.plan.plan import Plan, Planner, costs_of_step, plan_with_costs
from bytescale.plan.rank_plan import RankPlan
from bytescale.plan.summary import PlanSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTimes:
    """What the data of one step cost on one rank: seconds and bytes."""

    planning_seconds: float
    wait_seconds: float = 0.0
    """How long training waited for the step."""
    bytes_read: int = 0
    """Bytes of the corpus that were read for this rank's slices."""
    bytes_received: int = 0
    """Bytes that this rank received from planner and servers; 0 under the local loader."""
    steps_ready: int = 0
    """Finished steps that were waiting when training asked for this one."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A global batch with its plan, of which every rank gets its part."""

    batch: GlobalBatch
    plan: Plan
    digest: int
    summary: PlanSummary
    loss_per: LossPer
    state_after: SamplerState
    planning_seconds: float

    @staticmethod
    def draw(sampler: BatchSampler, planner: Planner, costs: Any, loss_per: LossPer) -> PlannedStep:
        """Draw the next batch and plan it with ``costs_of_step``."""
        batch = sampler.next_batch()
        started = time.perf_counter()
        return PlannedStep.of(batch, plan_with_costs(planner, batch.lengths, costs), sampler, loss_per, started)

    @staticmethod
    def of(batch: GlobalBatch, plan: Plan, sampler: BatchSampler, loss_per: LossPer, started: float) -> PlannedStep:
        """The plan of a batch that ``sampler`` has drawn; ``started``: by ``time.perf_counter``, to plan."""
        return PlannedStep(
            batch=batch,
            plan=plan,
            digest=plan.digest(),
            summary=PlanSummary.of(plan),
            loss_per=loss_per,
            state_after=sampler.state_dict(),
            planning_seconds=time.perf_counter() - started,
        )

    def part_of(self, rank: int) -> tuple[StepData, Segments]:
        """Return what ``rank`` needs of the step, without its tokens, and where these lie in the corpus."""
        rank_plan = RankPlan.of(self.plan, rank, digest=self.digest)
        data = StepData(
            step=self.batch.step,
            num_targets=self.batch.total_targets,
            loss_divisor=self.batch.scaling(self.loss_per).divisor,
            summary=self.summary,
            plan=self.plan,
            rank_plan=rank_plan,
            micro_batches=(),
            sampler_state_after=self.state_after,
            times=LoaderTimes(planning_seconds=self.planning_seconds),
        )
        return data, Segments.of(self.batch, rank_plan, self.loss_per)


class PrefetchedSteps(Iterator[StepData]):
    """Iterates over the steps of one rank. A thread makes them ahead of training. Use it in a ``with`` block.

    An error of the thread is raised when the turn of its step comes, with its own traceback.
    """

    def __init__(self, steps: Iterator[StepData], depth: int, write: Callable[[StepData], None] | None = None) -> None:
        """``depth``: steps that may wait behind the next one. ``write`` is called with every step before it is used."""
        assert depth >= 1, f"prefetching {depth} steps is not prefetching"
        self._steps = steps
        self._write = write
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bytescale-loader")
        self._asked = deque(self._thread.submit(next, steps, None) for _ in range(depth + 1))  # None: the end

    def __next__(self) -> StepData:
        started, ready = time.perf_counter(), sum(step.done() for step in self._asked)
        data = self._asked[0].result() if self._asked else None  # an error stays, for whoever asks again
        if data is None:
            raise StopIteration
        waited = time.perf_counter() - started
        self._asked.popleft()
        self._asked.append(self._thread.submit(next, self._steps, None))
        if self._write is not None:
            self._write(data)
        return replace(data, times=replace(data.times, wait_seconds=waited, steps_ready=ready))

    def close(self) -> None:
        """Drop what is ready, and wait until the thread has made what it is making. May be called twice."""
        self._thread.shutdown(cancel_futures=True)
        self._asked.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Feed(ABC):
    """A corpus and a position in its order, from which steps can be loaded. The trainer knows no more of the data."""

    record: Callable[[], Callable[[StepData], None] | None] | None = None
    """Called by ``open``: makes the function that writes down every step before it is handed out."""

    def __init__(self, prefetch_steps: int) -> None:
        self._prefetch_steps = prefetch_steps

    @property
    @abstractmethod
    def metadata(self) -> CorpusMetadata:
        """Summary of the parts of the corpus that have been read so far."""

    @abstractmethod
    def state_dict(self) -> SamplerState:
        """Return where the first step of ``open`` starts."""

    @abstractmethod
    def load_state_dict(self, state: SamplerState) -> None:
        """Go to ``state``, of whichever loader. Raises ``CheckpointError`` when it belongs to other data."""

    @abstractmethod
    def steps(self, planner: Planner, stop_step: int | None) -> Iterator[StepData]:
        """Yield steps from the current position on, up to the one before ``stop_step``; None: without an end."""

    @abstractmethod
    def close(self) -> None:
        """End the threads or actors that the feed started."""

    def open(self, planner: Planner, stop_step: int | None) -> PrefetchedSteps:
        """Load the ``steps`` in a thread, ahead of training. Raises as ``load_state_dict``."""
        self.state_dict()  # what the first step needs is read now
        write = None if self.record is None else self.record()
        return PrefetchedSteps(self.steps(planner, stop_step), self._prefetch_steps, write)


class LocalFeed(Feed):
    """Reads the corpus in this process. Every rank draws and plans the same batches, and reads its own slices."""

    def __init__(self, corpus: Corpus, config: DataConfig, rank: int) -> None:
        super().__init__(config.prefetch_steps)
        self._corpus = corpus
        self._config = config
        self._sampler: BatchSampler | None = None  # made when it is first needed
        self._rank = rank

    @property
    def metadata(self) -> CorpusMetadata:
        return self._corpus.metadata

    def state_dict(self) -> SamplerState:
        return self._started().state_dict()

    def load_state_dict(self, state: SamplerState) -> None:
        self._sampler = BatchSampler(self._corpus.index, self._config, state)

    def steps(self, planner: Planner, stop_step: int | None) -> Iterator[StepData]:
        sampler, token_bytes = self._started(), self._corpus.index.token_bytes
        while stop_step is None or sampler.next_step < stop_step:
            costs = costs_of_step(planner, sampler.next_step)
            planned = PlannedStep.draw(sampler, planner, costs, self._config.loss_per)
            data, segments = planned.part_of(self._rank)
            micro_batches = self._corpus.micro_batches(data.rank_plan, segments)
            times = replace(data.times, bytes_read=int(segments.counts.sum()) * token_bytes)
            yield replace(data, micro_batches=micro_batches, times=times)

    def _started(self) -> BatchSampler:
        self._sampler = self._sampler or BatchSampler(self._corpus.index, self._config)
        return self._sampler

    def close(self) -> None:
        self._corpus.close()
