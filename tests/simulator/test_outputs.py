"""Traces and pictures of simulated steps, random plans on random pipelines, and a cluster of the paper's size."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bytescale.plan import Plan
from bytescale.plan.pipeline_order import find_cycle
from bytescale.plan.plan import GroupSpec
from bytescale.simulator import ClusterConfig, simulate
from bytescale.simulator.draw import draw_steps, raster
from bytescale.simulator.trace import entries_of, save_trace, simulated_tracks
from tests.helpers.effort import examples
from tests.simulator.plans import aligned_plan, local_plan, profile
from tests.simulator.test_simulate import check_books


def test_trace_is_chrome_json_and_holds_every_task(tmp_path: Path) -> None:
    step = simulate(aligned_plan(), profile(), ClusterConfig(num_gpus=4, pp=2))
    ranks = range(step.events.num_ranks)
    save_trace([track for rank in ranks for track in simulated_tracks(step, rank)], tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tasks = [entry for entry in entries if entry["ph"] == "X"]
    assert len(tasks) == 6 * 2 * 2  # micro-batches x stages x directions
    assert {entry["name"] for entry in tasks} >= {"forward, shared by 2", "backward, local"}
    assert max(entry["ts"] + entry["dur"] for entry in tasks) == pytest.approx(step.step_seconds * 1e6)


def test_trace_of_some_ranks_only() -> None:
    step = simulate(local_plan([[6]] * 8), profile(), ClusterConfig(num_gpus=8))
    assert {entry["pid"] for entry in entries_of([*simulated_tracks(step, 0), *simulated_tracks(step, 7)])} == {0, 7}


@pytest.mark.parametrize("pp", [1, 2])
def test_encoders_run_before_and_behind_the_text(pp: int) -> None:
    """All ranks wait for the one that encodes longest; what ranks spend still adds up to the step."""
    text = simulate(
        aligned_plan() if pp == 2 else local_plan([[6, 6], [6]]), profile(), ClusterConfig(num_gpus=2 * pp, pp=pp)
    )
    forward, backward = np.array([2.0, 5.0]), np.array([4.0, 1.0])
    step = text.with_encoders((forward, backward))
    assert step.step_seconds == pytest.approx(text.step_seconds + 5 + 4)
    assert sum(step.shares().values()) == pytest.approx(1)
    assert step.shares()["encoders"] == pytest.approx(6 / pp / step.step_seconds)
    for rank in (0, 1):
        first, *_ = tracks = simulated_tracks(step, rank)
        begins, ends = ([span for span in first.spans if span.name == name] for name in ("encode", "encode: backward"))
        assert [(span.start, span.seconds) for span in begins] == [(0.0, forward[rank])]
        assert [span.seconds for span in ends] == [backward[rank]]
        of_text = [span for track in tracks for span in track.spans if span.category in ("forward", "backward")]
        assert min(span.start for span in of_text) >= 5
        assert max(span.end for span in of_text) <= ends[0].start
        assert max(span.end for track in tracks for span in track.spans) <= step.step_seconds + 1e-9
    picture, _ = raster(step, step.step_seconds)
    assert (picture[0] == 2).mean() == pytest.approx(6 / step.step_seconds, abs=0.01)


@pytest.mark.exhaustive
def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    step = simulate(local_plan([[6, 6], [6]]), profile(), ClusterConfig(num_gpus=2))
    picture, num_stages = raster(step, step.step_seconds)
    assert num_stages == 1
    assert not (picture[0] == 0).any()
    assert (picture[1] == 0).mean() == pytest.approx(0.5, abs=0.01)  # the second half is waiting
    staged = simulate(aligned_plan(), profile(), ClusterConfig(num_gpus=4, pp=2))
    draw_steps({"uneven": step, "two stages": staged}, tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").stat().st_size > 1000


@st.composite
def random_plans(draw: st.DrawFn) -> Plan:
    """Valid plans: shared groups in one total order, local micro-batches anywhere between."""
    num_ranks = draw(st.integers(1, 5))
    groups: list[GroupSpec] = []
    schedule: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    lengths: list[int] = []
    for number in range(draw(st.integers(1, 12))):
        ranks = sorted(draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks)))
        lengths.append(draw(st.integers(1, 40)))
        groups.append(GroupSpec(sequences=[number], ranks=ranks))
        for rank in ranks:
            schedule[rank].append([number])
    return Plan.build(lengths=lengths, capacity_tokens=[1000] * num_ranks, groups=groups, schedule=schedule)


@examples(50, 150)
@given(plan=random_plans(), stages=st.integers(1, 4))
def test_one_f_one_b_accounts_for_every_second(plan: Plan, stages: int) -> None:
    assume(not find_cycle(plan, stages, with_messages=False))
    model = profile(num_layers=4, quadratic=0.1, ring_bytes=3.0)
    cluster = ClusterConfig(num_gpus=plan.num_ranks * stages, pp=stages)
    step = simulate(plan, model, cluster)
    check_books(step)
    timeline = step.timeline
    assert (timeline.start >= timeline.arrival - 1e-9).all()
    for rank in range(plan.num_ranks):
        for stage in range(stages):
            mine = step.events.micro_batch_events[step.events.micro_batch_ranks == rank]
            start, end = timeline.start[mine, stage].ravel(), timeline.end[mine, stage].ravel()
            order = np.argsort(start, kind="stable")
            assert (start[order][1:] >= end[order][:-1] - 1e-9).all(), "a stage ran two things at once"


def test_sixteen_thousand_ranks_take_seconds() -> None:
    """Not a benchmark: only that nothing is quadratic in ranks. Measured 0.7 s on one core."""
    rng = np.random.default_rng(0)
    num_ranks = 16384
    plan = local_plan([rng.integers(1, 500, 2).tolist() for _ in range(num_ranks)])
    began = time.perf_counter()
    step = simulate(plan, profile(), ClusterConfig(num_gpus=num_ranks))
    assert time.perf_counter() - began < 30
    assert step.step_seconds == step.rank_seconds.max()
