"""Event-driven execution of 1F1B with shared slice groups. It finds when every task runs.

A *task* is the forward or the backward of one event on one part of the model. A part is a stage, or a chunk of an
interleaved stage. A task starts when its input has arrived and the stages of all members of the event are free for it.
It occupies all these stages until it ends. The schedule decides for which tasks a stage is free:

``1f1b``    The stage runs the fixed order of the runtime, plain or interleaved (``plan.schedule``). Shared groups may
            deadlock this order (see below). A deadlock is found and reported.
``aligned`` Stage p has at most ``pp - p`` micro-batches in flight, as in 1F1B, and prefers backward to forward. A stage
            that waits for members of a group runs another task that is ready. This schedule cannot deadlock: forwards
            run in the plan's total order on every rank, so the first unfinished event is in flight, or next, on all of
            its members. It exists only for plain stages, because the rounds through chunks have no such order.

An example that deadlocks under ``1f1b`` on two stages: rank A runs [g1, g2] and rank B runs [g1, y, y', g2]. On the
first stage, A runs forward(g2) before backward(g1), and B runs backward(g1) before forward(g2).

The heap holds ends of tasks and arrivals of inputs, never tokens. So simulating a step on 16,384 devices takes seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.common.errors import PlanError
from bytescale.plan.schedule import stage_actions
from bytescale.simulator.events import Events

Schedule = Literal["1f1b", "aligned"]
Progress = Callable[[int, int], None]
FORWARD, BACKWARD = 0, 1
_END, _ARRIVAL = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """When tasks ran, in seconds from the start of the first micro-batch.

    Arrays are ``[E, parts, 2]``; the last dimension is forward, backward. Part ``c pp + s`` is chunk c of stage s. A
    stage that is not interleaved is one part.
    """

    arrival: FloatArray  # when the task's input had arrived
    start: FloatArray
    end: FloatArray


def run_events(
    events: Events,
    seconds: FloatArray,
    transfer_seconds: FloatArray,
    *,
    num_stages: int,
    schedule: Schedule = "aligned",
    progress: Progress | None = None,
) -> Timeline:
    """Run all tasks.

    Args:
        events: the events, which say who runs what and in which order.
        seconds: ``[parts, 2, E]`` duration of every task.
        transfer_seconds: ``[E]`` time to send the result from one part to the next, in either direction.
        num_stages: number of stages, pp. The number of parts must be a multiple of it.
        schedule: see the top of this file. If there are more parts than stages, it must be ``1f1b``.
        progress: called with (tasks done, tasks) now and then.

    Raises:
        PlanError: the schedule deadlocks.
    """
    strict = schedule == "1f1b"
    assert strict or len(seconds) == num_stages, "the aligned schedule has no interleaved form"
    engine = _Engine(events, seconds, transfer_seconds, num_stages, strict=strict)
    return engine.run(progress)


class _Engine:
    """State of one run. Stages of ranks and tasks are numbered.

    Stage s of rank r is ``unit = r * pp + s``. The task of an event on a part is ``(event * parts + part) * 2 + d``
    with d = ``FORWARD`` or ``BACKWARD``.
    """

    def __init__(
        self, events: Events, seconds: FloatArray, transfer: FloatArray, num_stages: int, *, strict: bool
    ) -> None:
        self.events, self.parts, self.pp = events, seconds.shape[0], num_stages
        self.duration: list[float] = seconds.transpose(2, 0, 1).ravel().tolist()
        self.transfer: list[float] = transfer.tolist()
        member_ranks = events.micro_batch_ranks[events.member_micro_batches].tolist()
        bounds = events.member_offsets.tolist()
        self.members = [member_ranks[bounds[e] : bounds[e + 1]] for e in range(events.num_events)]
        counts = np.bincount(events.micro_batch_ranks, minlength=events.num_ranks)
        edges = np.concatenate([[0], np.cumsum(counts)]).tolist()
        order = events.micro_batch_events.tolist()
        self.queue = [order[edges[r] : edges[r + 1]] for r in range(events.num_ranks)]
        self.order = self._fixed_order(counts) if strict else []  # the tasks of each unit in order
        num_tasks = 2 * self.parts * events.num_events
        self.num_tasks = num_tasks
        self.arrival = [float("inf")] * num_tasks
        self.start = [0.0] * num_tasks
        self.end = [0.0] * num_tasks
        self.waiting = [0] * num_tasks  # members whose stage is free for the task
        self.offered: list[tuple[int, ...]] = [()] * (events.num_ranks * self.pp)
        self.done = [[0, 0] for _ in range(events.num_ranks * self.pp)]  # forwards and backwards that each unit started
        self.heap: list[tuple[float, int, int]] = []

    def run(self, progress: Progress | None) -> Timeline:
        for event in range(self.events.num_events):
            self.arrival[event * self.parts * 2] = 0.0
        touched: set[int] = set()
        for rank in range(self.events.num_ranks):
            for stage in range(self.pp):
                touched.update(self._offer(rank, stage))
        self._start_ready(touched, 0.0)
        ended, report = 0, max(1, self.num_tasks // 200)
        while self.heap:
            now = self.heap[0][0]
            touched = set()
            while self.heap and self.heap[0][0] == now:
                _, kind, task = heapq.heappop(self.heap)
                if kind == _ARRIVAL:
                    touched.add(task)
                    continue
                ended += 1
                if progress is not None and ended % report == 0:
                    progress(ended, self.num_tasks)
                touched.update(self._finish(task, now))
            self._start_ready(touched, now)
        if ended < self.num_tasks:
            raise self._deadlock(self.num_tasks - ended)
        if progress is not None:
            progress(ended, self.num_tasks)
        shape = (self.events.num_events, self.parts, 2)
        arrays = (np.array(values).reshape(shape) for values in (self.arrival, self.start, self.end))
        return Timeline(**dict(zip(("arrival", "start", "end"), arrays, strict=True)))

    def _fixed_order(self, counts: IntArray) -> list[list[int]]:
        """Return the tasks of every unit, in the order of ``plan.schedule``. ``counts [R]`` micro-batches per rank."""
        order: list[list[int]] = []
        most, num_chunks = int(counts.max(initial=0)), self.parts // self.pp
        for rank, queue in enumerate(self.queue):
            events = np.array(queue, dtype=np.int64)
            for stage in range(self.pp):
                backward, chunk, index = stage_actions(int(counts[rank]), self.pp, stage, num_chunks, most).T
                order.append((2 * (events[index] * self.parts + chunk * self.pp + stage) + backward).tolist())
        return order

    def _offer(self, rank: int, stage: int) -> tuple[int, ...]:
        """Return the tasks that a free stage may run next.

        Under ``1f1b`` this is the next task of the fixed order. Under ``aligned`` it is the oldest backward that is
        due, and the next forward if few enough micro-batches are in flight.
        """
        unit = rank * self.pp + stage
        forwards, backwards = self.done[unit]
        tasks: list[int] = []
        if self.order:
            tasks = self.order[unit][forwards + backwards : forwards + backwards + 1]
        else:
            queue, in_flight = self.queue[rank], forwards - backwards
            if in_flight > 0:
                tasks.append((queue[backwards] * self.parts + stage) * 2 + BACKWARD)
            if forwards < len(queue) and in_flight < self.pp - stage:
                tasks.append((queue[forwards] * self.parts + stage) * 2 + FORWARD)
        self.offered[unit] = tuple(tasks)
        for task in tasks:
            self.waiting[task] += 1
        return self.offered[unit]

    def _start_ready(self, touched: set[int], now: float) -> None:
        """Start those of ``touched`` that can start. To decide ties, backwards go first, then earlier events."""
        for task in sorted(touched, key=lambda task: (1 - task % 2, task)):
            event, stage = task // 2 // self.parts, task // 2 % self.parts % self.pp
            members = self.members[event]
            if self.waiting[task] < len(members) or self.arrival[task] > now:
                continue
            for rank in members:
                unit = rank * self.pp + stage
                for other in self.offered[unit]:
                    self.waiting[other] -= 1
                self.offered[unit] = ()
                self.done[unit][task % 2] += 1
            self.start[task] = now
            self.end[task] = now + self.duration[task]
            heapq.heappush(self.heap, (self.end[task], _END, task))

    def _finish(self, task: int, now: float) -> list[int]:
        """Free the stages of the members, and send the result on. Returns the tasks that may be able to start now."""
        event, part, direction = task // 2 // self.parts, task // 2 % self.parts, task % 2
        if direction == FORWARD:
            last = part == self.parts - 1
            following = task + 1 if last else task + 2
            delay = 0.0 if last else self.transfer[event]
        else:
            following = task - 2 if part > 0 else -1
            delay = self.transfer[event]
        touched: list[int] = []
        if following >= 0:
            self.arrival[following] = now + delay
            if delay > 0:
                heapq.heappush(self.heap, (now + delay, _ARRIVAL, following))
            else:
                touched.append(following)
        for rank in self.members[event]:
            touched.extend(self._offer(rank, part % self.pp))
        return touched

    def _deadlock(self, left: int) -> PlanError:
        stuck = next(e for e in range(self.events.num_events) if self.end[e * self.parts * 2 + 1] == 0.0)
        chunks = self.parts // self.pp
        stages, other = f"{self.pp} stages", 'schedule = "aligned"'
        if chunks > 1:
            stages, other = f"{self.pp} stages of {chunks} chunks", "virtual_stages = 1"
        return PlanError(
            f"the 1F1B schedule deadlocks on {stages}: {left} of {self.num_tasks} tasks never start; the "
            f"first unfinished group is shared by ranks {self.members[stuck][:8]}",
            so="real ranks would wait for each other forever",
            fix=f"use {other}, or a plan whose groups meet at equal places in their ranks' orders",
        )
