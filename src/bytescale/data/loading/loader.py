"""The loader of one rank: it draws and plans every step, some steps ahead of training, and reads the rank's slices."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

from bytescale.config.schema import DataConfig
from bytescale.data.loading.assemble import MicroBatchData, Segments
from bytescale.data.loading.corpus import Corpus
from bytescale.data.order.batches import BatchSampler, GlobalBatch, SamplerState
from bytescale.data.order.index import CorpusMetadata
from bytescale.plan.plan import PREFETCH_STEPS, Plan, Planner, StepPlanner
from bytescale.plan.rank_plan import RankPlan
from bytescale.plan.trees import Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTimes:
    """What the data of one step cost on one rank: seconds and bytes."""

    planning_seconds: float
    wait_seconds: float = 0.0
    """How long training waited for the step."""
    bytes_read: int = 0
    """Bytes of the corpus that were read for this rank's slices."""
    steps_ready: int = 0
    """Finished steps that were waiting when training asked for this one."""
    restarts: int = 0
    """Restarts of servers that this rank has noticed so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """What one rank needs for one step."""

    step: int
    num_targets: int
    """Labels in the GLOBAL batch that are trained on."""
    loss_divisor: float
    """What the sum of weighted losses of the GLOBAL batch is divided by (``data.loss_per``)."""
    plan: Plan
    rank_plan: RankPlan
    micro_batches: tuple[MicroBatchData, ...]
    """One per micro-batch of ``rank_plan``. A rank may have none."""
    sampler_state_after: SamplerState
    """Where the next step starts."""
    times: LoaderTimes
    forest: Forest | None = None
    """The documents whose rows the sequences of ``plan`` are, where they share prefixes."""
    items: Any = None
    """What a loader of pictures has made of the batch's (``hf.loop.pictures``)."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One of the processes that read a corpus together."""

    hdp_rank: int
    """HDP rank whose slices are read. With tensor or pipeline parallelism, several processes have the same."""
    num_processes: int
    is_first: bool
    """Whether this process starts the servers of the remote loader."""
    broadcast: Callable[[list[Any]], None]
    """Replaces the items of a list by those of the first process. Every process calls it."""


class PrefetchedSteps(Iterator[StepData]):
    """Iterates over the steps of one rank. A thread makes them ahead of training. Use it in a ``with`` block.

    An error of the thread is raised when the turn of its step comes, with its own traceback.
    """

    def __init__(self, steps: Iterator[StepData], write: Callable[[StepData], None] | None = None) -> None:
        """``write`` is called with every step before it is used."""
        self._steps = steps
        self._write = write
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bytescale-loader")
        self._asked = deque(self._thread.submit(next, steps, None) for _ in range(PREFETCH_STEPS + 1))  # None: the end

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


class Loader:
    """A corpus and a position in its order, from which steps can be loaded. The trainer knows no more of the data.

    Every rank draws and plans the same batches, and reads its own slices.
    """

    record: Callable[[], Callable[[StepData], None] | None] | None = None
    """Called by ``open``: makes the function that writes down every step before it is handed out."""

    def __init__(self, corpus: Corpus, config: DataConfig, rank: int) -> None:
        self.corpus = corpus
        self._config = config
        self._rank = rank
        self._sampler: BatchSampler | None = None  # made when it is first needed

    @property
    def metadata(self) -> CorpusMetadata:
        """Summary of the parts of the corpus that have been read so far."""
        return self.corpus.metadata

    def state_dict(self) -> SamplerState:
        """Return where the next step starts."""
        return self._started().state_dict()

    def load_state_dict(self, state: SamplerState) -> None:
        """Go to ``state``, of whichever loader. Raises ``CheckpointError`` when it belongs to other data."""
        self._sampler = BatchSampler(self.corpus.index, self._config, state)

    def open(self, planner: Planner, stop_step: int | None) -> PrefetchedSteps:
        """Load the ``steps`` in a thread, ahead of training. Raises as ``load_state_dict``."""
        self.state_dict()  # what the first step needs is read now
        write = None if self.record is None else self.record()
        return PrefetchedSteps(self.steps(planner, stop_step), write)

    def steps(self, planner: Planner, stop_step: int | None) -> Iterator[StepData]:
        """Yield steps from the current position on, up to the one before ``stop_step``; None: without an end."""
        sampler = self._started()
        while stop_step is None or sampler.next_step < stop_step:
            batch, started = sampler.next_batch(), time.perf_counter()
            own = self._planner_of(planner, batch)
            if isinstance(own, StepPlanner):
                plan = own.plan_step(batch.lengths, batch.step)
            else:
                plan = own(batch.lengths)
            yield self._with_tokens(batch, self._part_of(batch, plan, started))

    def _planner_of(self, planner: Planner, batch: GlobalBatch) -> Planner:
        """The planner of a batch, of whose documents a loader may know more than their lengths."""
        return planner

    def _started(self) -> BatchSampler:
        self._sampler = self._sampler or BatchSampler(self.corpus.index, self._config)
        return self._sampler

    def _part_of(self, batch: GlobalBatch, plan: Plan, started: float) -> StepData:
        """What this rank needs of a step, without its tokens. ``started``: by ``time.perf_counter``, to plan."""
        return StepData(
            step=batch.step,
            num_targets=batch.total_targets,
            loss_divisor=batch.scaling(self._config.loss_per).divisor,
            plan=plan,
            rank_plan=RankPlan.of(plan, self._rank),
            micro_batches=(),
            sampler_state_after=self._started().state_dict(),
            times=LoaderTimes(planning_seconds=time.perf_counter() - started, restarts=self.corpus.parts.restarts),
        )

    def _with_tokens(self, batch: GlobalBatch, data: StepData) -> StepData:
        """Read the slices of this rank's part of ``batch``."""
        corpus = self.corpus
        segments = Segments.of(batch, data.rank_plan, self._config.loss_per)
        micro_batches = corpus.micro_batches(data.rank_plan, segments)
        read = int(segments.ranges.sum()) * corpus.index.token_bytes
        return replace(data, micro_batches=micro_batches, times=replace(data.times, bytes_read=read))
