"""Interleaved stages: the ideal bubble, the activations that they hold, and the engine against a slow twin."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bytescale.common.errors import ConfigError, PlanError
from bytescale.cost.memory import ModelShare
from bytescale.plan import Plan
from bytescale.plan.pipeline_order import find_cycle
from bytescale.plan.schedule import stage_actions
from bytescale.simulator import ClusterConfig, SimulatedStep, simulate
from bytescale.simulator.draw import raster
from bytescale.simulator.engine import run_events
from bytescale.simulator.events import events_of
from bytescale.simulator.trace import save_trace
from tests.helpers.effort import examples
from tests.simulator.plans import deadlocking_plan, local_plan, profile
from tests.simulator.test_outputs import random_plans
from tests.simulator.test_simulate import check_books


def on(stages: int, chunks: int, ranks: int = 1) -> ClusterConfig:
    return ClusterConfig(num_gpus=ranks * stages, pp=stages, virtual_stages=chunks)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_ideal_interleaved_bubble(stages: int, chunks: int, rounds: int) -> None:
    """(p - 1) / (v m + p - 1) of the step, for whole rounds of equal micro-batches and free transfers."""
    count, layers = rounds * stages, 2 * stages * chunks
    step = simulate(local_plan([[6] * count] * 2), profile(num_layers=layers), on(stages, chunks, 2))
    chunk_seconds = 3 * 6 * layers / (stages * chunks)
    assert step.step_seconds == pytest.approx((chunks * count + stages - 1) * chunk_seconds)
    bubble = (stages - 1) / (chunks * count + stages - 1)
    np.testing.assert_allclose(step.pp_bubble / step.step_seconds, bubble)
    assert step.dp_bubble.sum() == pytest.approx(0)
    check_books(step)


def test_a_last_round_that_is_not_full_waits() -> None:
    """Five micro-batches on four stages: the order is that of eight, of which three are skipped."""
    cluster, model = on(4, 2), profile(num_layers=24)
    five, eight = (simulate(local_plan([[6] * count]), model, cluster).step_seconds for count in (5, 8))
    ideal = (2 * 5 + 4 - 1) * 3 * 6 * 24 / 8
    assert ideal < five < eight


@examples(20, 60)
@given(plan=random_plans(), stages=st.integers(2, 4))
def test_work_is_conserved_and_every_second_is_accounted_for(plan: Plan, stages: int) -> None:
    model = profile(num_layers=12, quadratic=0.1, ring_bytes=3.0)
    assume(not any(find_cycle(plan, stages, chunks, with_messages=False) for chunks in (1, 2)))
    plain = simulate(plan, model, on(stages, 1, plan.num_ranks))
    step = simulate(plan, model, on(stages, 2, plan.num_ranks))
    check_books(step)
    for name in ("compute", "exposed_ring", "wait_members"):
        np.testing.assert_allclose(getattr(step, name).sum(axis=1), getattr(plain, name).sum(axis=1), atol=1e-9)
    busy = sum(getattr(step, name) for name in ("compute", "exposed_ring", "exposed_offload", "wait_members"))
    seconds = (step.timeline.end - step.timeline.start).reshape(-1, 2, stages, 2).sum(axis=(1, 3))
    ran = np.zeros_like(busy)
    np.add.at(ran, step.events.micro_batch_ranks, seconds[step.events.micro_batch_events])
    np.testing.assert_allclose(busy, ran, atol=1e-9)
    assert step.traffic.ring_inter_node == pytest.approx(plain.traffic.ring_inter_node)
    assert step.traffic.pipeline * (stages - 1) == pytest.approx(plain.traffic.pipeline * (2 * stages - 1))


@examples(50, 150)
@given(plan=random_plans(), stages=st.integers(1, 4), chunks=st.integers(1, 3), seed=st.integers(0, 99))
def test_the_engine_against_a_slow_twin(plan: Plan, stages: int, chunks: int, seed: int) -> None:
    """Random durations: equal to the last bit, as both only add and take the latest; a deadlock where there is a cycle.

    With one chunk the twin follows the rule of plain 1F1B, not ``plan.schedule``.
    """
    chunks = 1 if stages == 1 else chunks
    events, random = events_of(plan), np.random.default_rng(seed)
    seconds = random.uniform(0.1, 9.0, (stages * chunks, 2, events.num_events))
    transfer = random.uniform(0.0, 2.0, events.num_events)
    if find_cycle(plan, stages, chunks, with_messages=False):
        with pytest.raises(PlanError, match="deadlocks"):
            run_events(events, seconds, transfer, num_stages=stages)
        return
    timeline = run_events(events, seconds, transfer, num_stages=stages)
    np.testing.assert_array_equal(timeline.start, slow_starts(plan, seconds, transfer, stages, chunks))
    np.testing.assert_array_equal(timeline.end, timeline.start + seconds.transpose(2, 0, 1))


def slow_starts(
    plan: Plan, seconds: NDArray[np.float64], transfer: NDArray[np.float64], stages: int, chunks: int
) -> NDArray[np.float64]:
    """``[E, parts, 2]``: every task as late as what it waits for, over and over until nothing moves."""
    events, parts = events_of(plan), stages * chunks
    start = np.zeros((events.num_events, parts, 2))
    counts = np.bincount(events.micro_batch_ranks, minlength=events.num_ranks)
    chains = []  # of tasks on each rank's stages
    for rank, count in enumerate(counts.tolist()):
        queue = events.micro_batch_events[events.micro_batch_ranks == rank]
        for stage in range(stages):
            if chunks == 1:
                order = [(back, 0, index) for back, index in plain_order(count, stages - stage)]
            else:
                order = stage_actions(count, stages, stage, chunks, int(counts.max())).tolist()
            chains.append([(int(queue[index]), chunk * stages + stage, back) for back, chunk, index in order])
    while True:
        before, end = start.copy(), start + seconds.transpose(2, 0, 1)
        for chain in chains:
            for first, then in pairwise(chain):
                start[then] = max(start[then], end[first])
        for part in range(parts - 1):
            start[:, part + 1, 0] = np.maximum(start[:, part + 1, 0], end[:, part, 0] + transfer)
            start[:, part, 1] = np.maximum(start[:, part, 1], end[:, part + 1, 1] + transfer)
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


def most_chunks_held(step: SimulatedStep) -> NDArray[np.int64]:
    """``[pp]`` the most chunks of micro-batches that rank 0 has between their forward and their backward."""
    most = []
    for stage in range(step.num_stages):
        start, end = (
            step.timeline.start[:, stage :: step.num_stages, 0],
            step.timeline.end[:, stage :: step.num_stages, 1],
        )
        changes = sorted([(when, 1) for when in start.ravel()] + [(when, -1) for when in end.ravel()])
        most.append(np.cumsum([change for _, change in changes]).max())
    return np.array(most)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (4, 3)])
def test_interleaving_holds_more_activations(stages: int, chunks: int) -> None:
    """2 (p - 1 - s) + (v - 1) p + 1 chunks, once that many forwards have run; plain 1F1B p - s stages."""
    plan, layers = local_plan([[6] * 5 * stages]), 24
    plain = most_chunks_held(simulate(plan, profile(num_layers=layers), on(stages, 1)))
    held = most_chunks_held(simulate(plan, profile(num_layers=layers), on(stages, chunks)))
    stage = np.arange(stages)
    np.testing.assert_array_equal(held, 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1)
    np.testing.assert_array_equal(plain, stages - stage)
    # The capacity is counted with whole micro-batches in flight: never fewer, at most one more than there are.
    shape = profile(num_layers=layers).architecture
    for stage, layers_held in enumerate(held * layers // (stages * chunks)):
        own = ModelShare(architecture=shape, num_stages=stages, stage=stage, virtual_stages=chunks)
        assert (own.num_in_flight - 1) * own.num_layers < layers_held <= own.num_in_flight * own.num_layers


def test_chunks_lie_in_trace_and_picture_on_their_stage(tmp_path: Path) -> None:
    step = simulate(local_plan([[6] * 4, [9, 3]]), profile(num_layers=8), on(2, 2, 2))
    save_trace(step, tmp_path / "trace.json")
    tasks = [entry for entry in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if entry["ph"] == "X"]
    assert len(tasks) == 6 * 4 * 2  # micro-batches x parts x directions
    assert {entry["name"] for entry in tasks} == {
        f"{direction}, local, chunk {chunk}" for direction in ("forward", "backward") for chunk in (0, 1)
    }
    threads = {(entry["pid"], entry["tid"]) for entry in tasks}
    assert threads == {(rank, stage) for rank in (0, 1) for stage in (0, 1)}
    for thread in threads:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in tasks if (e["pid"], e["tid"]) == thread)
        assert all(first[1] <= then[0] + 1e-6 for first, then in pairwise(mine)), "two at once"
    picture, num_stages = raster(step, step.step_seconds)
    assert (len(picture), num_stages) == (4, 2)
    busy = [step.stage_event_seconds[:4, stage].sum() / step.step_seconds for stage in (0, 1)]
    assert [(picture[row] != 0).mean() for row in (0, 2)] == pytest.approx(busy, abs=0.02)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            {"num_gpus": 4, "pp": 2, "virtual_stages": 0},
            "virtual_stages is 0. To fix: use a whole number of at least 1",
        ),
        ({"num_gpus": 4, "virtual_stages": 2}, r"virtual_stages = 2 without a pipeline \(parallel.pp = 1\)"),
    ],
)
def test_impossible_chunks(cluster: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(**cluster)


def test_chunks_that_this_model_or_plan_does_not_have() -> None:
    with pytest.raises(
        ConfigError, match=r"parallel.pp = 2 x parallel.virtual_stages = 3 exceeds the model's 4 layers"
    ):
        simulate(local_plan([[6]]), profile(num_layers=4), on(2, 3))
    with pytest.raises(PlanError, match=r"deadlocks on 2 stages of 2 chunks: .*To fix: use virtual_stages = 1"):
        simulate(deadlocking_plan(), profile(num_layers=4), on(2, 2, 2))
