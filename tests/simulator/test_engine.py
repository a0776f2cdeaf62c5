"""Stages: the ideal bubble, the activations that they hold, and the engine against a slow twin."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bytescale.common.errors import ConfigError, PlanError
from bytescale.plan import Plan
from bytescale.plan.pipeline_order import find_cycle
from bytescale.simulator import ClusterConfig, simulate
from bytescale.simulator.draw import raster
from bytescale.simulator.engine import run_events
from bytescale.simulator.events import events_of
from bytescale.simulator.trace import save_trace, simulated_tracks
from tests.helpers.effort import examples
from tests.simulator.plans import deadlocking_plan, local_plan, profile
from tests.simulator.test_outputs import random_plans
from tests.simulator.test_simulate import check_books


def on(stages: int, ranks: int = 1) -> ClusterConfig:
    return ClusterConfig(num_gpus=ranks * stages, pp=stages)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_ideal_bubble(stages: int, count: int) -> None:
    """(p - 1) / (m + p - 1) of the step, for equal micro-batches and free transfers."""
    layers = 2 * stages
    step = simulate(local_plan([[6] * count] * 2), profile(num_layers=layers), on(stages, 2))
    assert step.step_seconds == pytest.approx((count + stages - 1) * 3 * 6 * layers / stages)
    np.testing.assert_allclose(step.pp_bubble / step.step_seconds, (stages - 1) / (count + stages - 1))
    assert step.dp_bubble.sum() == pytest.approx(0)
    check_books(step)


@examples(50, 150)
@given(plan=random_plans(), stages=st.integers(1, 4), seed=st.integers(0, 99))
def test_the_engine_against_a_slow_twin(plan: Plan, stages: int, seed: int) -> None:
    """Random durations: equal to the last bit, as both only add and take the latest; a deadlock where there is a cycle.

    The twin follows the rule of 1F1B, not ``plan.schedule``.
    """
    events, random = events_of(plan), np.random.default_rng(seed)
    seconds = random.uniform(0.1, 9.0, (stages, 2, events.num_events))
    transfer = random.uniform(0.0, 2.0, events.num_events)
    if find_cycle(plan, stages, with_messages=False):
        with pytest.raises(PlanError, match="deadlocks"):
            run_events(events, seconds, transfer)
        return
    timeline = run_events(events, seconds, transfer)
    np.testing.assert_array_equal(timeline.start, slow_starts(plan, seconds, transfer, stages))
    np.testing.assert_array_equal(timeline.end, timeline.start + seconds.transpose(2, 0, 1))


def slow_starts(
    plan: Plan, seconds: NDArray[np.float64], transfer: NDArray[np.float64], stages: int
) -> NDArray[np.float64]:
    """``[E, pp, 2]``: every task as late as what it waits for, over and over until nothing moves."""
    events = events_of(plan)
    start = np.zeros((events.num_events, stages, 2))
    counts = np.bincount(events.micro_batch_ranks, minlength=events.num_ranks)
    chains = []  # of tasks on each rank's stages
    for rank, count in enumerate(counts.tolist()):
        queue = events.micro_batch_events[events.micro_batch_ranks == rank]
        for stage in range(stages):
            chains.append([(int(queue[index]), stage, back) for back, index in plain_order(count, stages - stage)])
    while True:
        before, end = start.copy(), start + seconds.transpose(2, 0, 1)
        for chain in chains:
            for first, then in pairwise(chain):
                start[then] = max(start[then], end[first])
        for stage in range(stages - 1):
            start[:, stage + 1, 0] = np.maximum(start[:, stage + 1, 0], end[:, stage, 0] + transfer)
            start[:, stage, 1] = np.maximum(start[:, stage, 1], end[:, stage + 1, 1] + transfer)
        start[:, -1, 1] = np.maximum(start[:, -1, 1], end[:, -1, 0])
        if (start == before).all():
            return start


def plain_order(count: int, most_in_flight: int) -> list[tuple[int, int]]:
    """1F1B by its rule: a forward while few enough are in flight, else a backward."""
    order: list[tuple[int, int]] = []
    forwards = backwards = 0
    while backwards < count:
        if forwards < count and forwards - backwards < most_in_flight:
            order.append((0, forwards))
            forwards += 1
        else:
            order.append((1, backwards))
            backwards += 1
    return order


@pytest.mark.parametrize("stages", [2, 4])
def test_a_stage_holds_as_many_micro_batches_as_memory_is_counted_for(stages: int) -> None:
    step = simulate(local_plan([[6] * 5 * stages]), profile(num_layers=24), on(stages))
    for stage in range(stages):
        start, end = step.timeline.start[:, stage, 0], step.timeline.end[:, stage, 1]
        changes = sorted([(when, 1) for when in start] + [(when, -1) for when in end])
        assert np.cumsum([change for _, change in changes]).max() == stages - stage


def test_stages_have_rows_of_their_own_in_trace_and_picture(tmp_path: Path) -> None:
    step = simulate(local_plan([[6] * 4, [9, 3]]), profile(num_layers=8), on(2, 2))
    ranks = range(step.events.num_ranks)
    save_trace([track for rank in ranks for track in simulated_tracks(step, rank)], tmp_path / "trace.json")
    tasks = [entry for entry in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if entry["ph"] == "X"]
    assert len(tasks) == 6 * 2 * 2  # micro-batches x stages x directions
    assert {entry["name"] for entry in tasks} == {"forward, local", "backward, local"}
    threads = {(entry["pid"], entry["tid"]) for entry in tasks}
    assert threads == {(rank, stage) for rank in (0, 1) for stage in (0, 1)}
    for thread in threads:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in tasks if (e["pid"], e["tid"]) == thread)
        assert all(first[1] <= then[0] + 1e-6 for first, then in pairwise(mine)), "two at once"
    picture, num_stages = raster(step, step.step_seconds)
    assert (len(picture), num_stages) == (4, 2)
    busy = [step.stage_event_seconds[:4, stage].sum() / step.step_seconds for stage in (0, 1)]
    assert [(picture[row] != 0).mean() for row in (0, 2)] == pytest.approx(busy, abs=0.02)


def test_stages_that_this_model_or_plan_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"parallel.pp = 5 exceeds the model's 4 layers"):
        simulate(local_plan([[6]]), profile(num_layers=4), on(5))
    with pytest.raises(PlanError, match=r"deadlocks on 2 stages: .*To fix: use a plan whose groups meet"):
        simulate(deadlocking_plan(), profile(num_layers=4), on(2, 2))
