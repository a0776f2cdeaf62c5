"""Execution of 1F1B with shared slice groups: finds when every task runs.

A *task* is the forward or the backward of one event on one stage. A stage runs its tasks in the order of the runtime
(``plan.schedule``). A task starts when its input has arrived and the stages of all members of the event have ended what
comes before it. It occupies all these stages until it ends.

Shared groups may deadlock this order, which is found and reported (``plan.pipeline_order`` has an example).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bytescale.common.arrays import FloatArray
from bytescale.common.errors import PlanError
from bytescale.plan.schedule import stage_actions
from bytescale.simulator.events import Events


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """When tasks ran, in seconds from the start of the first micro-batch.

    Arrays are ``[E, pp, 2]``; the last dimension is forward, backward.
    """

    arrival: FloatArray  # when the task's input had arrived
    start: FloatArray
    end: FloatArray


def run_events(events: Events, seconds: FloatArray, transfer_seconds: FloatArray) -> Timeline:
    """Run all tasks. Tasks are numbered ``(event * pp + stage) * 2 + d``, d = 1 for a backward.

    Args:
        seconds: ``[pp, 2, E]`` duration of every task.
        transfer_seconds: ``[E]`` time to send the result from one stage to the next, in either direction.

    Raises:
        PlanError: the order deadlocks.
    """
    num_stages = len(seconds)
    ranks = events.micro_batch_ranks[events.member_micro_batches].tolist()
    bounds, transfer = events.member_offsets.tolist(), transfer_seconds.tolist()
    duration: list[float] = seconds.transpose(2, 0, 1).ravel().tolist()
    arrival, start, end = ([0.0] * len(duration) for _ in range(3))
    # What every task still waits for: its input, and the turn on the stage of each member.
    missing = (np.repeat(np.diff(events.member_offsets), 2 * num_stages) + 1).tolist()
    ready: list[int] = []

    def allow(task: int, moment: float) -> None:
        start[task] = max(start[task], moment)
        missing[task] -= 1
        if not missing[task]:
            ready.append(task)

    turns = [iter(order) for order in _orders(events, num_stages)]  # of stage s of rank r: r pp + s
    for first in (next(order, None) for order in turns):
        if first is not None:
            allow(first, 0.0)
    for event in range(events.num_events):
        allow(2 * event * num_stages, 0.0)
    num_ended = 0
    while ready:
        task = ready.pop()
        num_ended += 1
        event, stage, is_backward = task // 2 // num_stages, task // 2 % num_stages, task % 2
        ended = end[task] = start[task] + duration[task]
        is_turn = not is_backward and stage == num_stages - 1
        if is_turn or not (is_backward and stage == 0):
            following = task + 1 if is_turn else task + (-2 if is_backward else 2)
            arrival[following] = ended + (0.0 if is_turn else transfer[event])
            allow(following, arrival[following])
        for rank in ranks[bounds[event] : bounds[event + 1]]:
            after = next(turns[rank * num_stages + stage], None)
            if after is not None:
                allow(after, ended)
    if num_ended < len(duration):
        stuck = next(event for event in range(events.num_events) if missing[2 * event * num_stages + 1])
        members = ranks[bounds[stuck] : bounds[stuck + 1]]
        raise PlanError(
            f"the 1F1B schedule deadlocks on {num_stages} stages: {len(duration) - num_ended} of {len(duration)} tasks "
            f"never start; the first unfinished group is shared by ranks {members[:8]}",
            so="real ranks would wait for each other forever",
            fix="use a plan whose groups meet at equal places in their ranks' orders (planner.align)",
        )
    shape = (events.num_events, num_stages, 2)
    return Timeline(
        arrival=np.array(arrival).reshape(shape), start=np.array(start).reshape(shape), end=np.array(end).reshape(shape)
    )


def _orders(events: Events, num_stages: int) -> list[list[int]]:
    counts = np.bincount(events.micro_batch_ranks, minlength=events.num_ranks)
    orders: list[list[int]] = []
    for own in np.split(events.micro_batch_events, np.cumsum(counts)[:-1]):
        for stage in range(num_stages):
            backward, index = stage_actions(len(own), num_stages, stage).T
            orders.append((2 * (own[index] * num_stages + stage) + backward).tolist())
    return orders
