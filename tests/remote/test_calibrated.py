"""Runs that calibrate their costs have the same plans under both loaders, also after a kill."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale.config.schema import Config, CostConfig, PlannerConfig
from bytescale.cost.calibration import TERMS
from bytescale.plan import Plan, RankPlan
from bytescale.plan.io import load_plan
from bytescale.train.parts.calibration import RunCalibration, counts_of
from tests.train.runs import interrupt, on_ranks, run, small_run, with_trainer, write_corpus

STEPS = 9
SPEEDS = (1.0, 0.4, 1.0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, ray_address: str) -> None:
    """Ranks measure what their counts say, at a speed of its own each. They join the tests' Ray."""
    observe = RunCalibration.observe

    def observe_counts(
        self: RunCalibration, step: int, plan: Plan, rank_plan: RankPlan, busy_seconds: float, passes_seconds: float
    ) -> None:
        row = np.array(counts_of(rank_plan, self.planner.calibrator.first))
        first = [getattr(self.planner.calibrator.first, name) for name in TERMS]
        busy = float(row @ first) * (3.0 + 0.01 * (step % 3)) / SPEEDS[rank_plan.rank]
        observe(self, step, plan, rank_plan, busy, busy)  # compute hides all messages

    monkeypatch.setattr(RunCalibration, "observe", observe_counts)
    monkeypatch.setenv("RAY_ADDRESS", ray_address)


def config_of(folder: Path, name: str, loader: str) -> Config:
    config = on_ranks(small_run(write_corpus(folder / "corpus"), folder / name, steps=STEPS), 3, 128)
    data = replace(config.data, loader=loader, servers=1)
    return replace(config, data=data, cost=CostConfig(calibrate=True), planner=PlannerConfig())


def digests(folder: Path, steps: Sequence[int] = range(1, STEPS + 1)) -> list[int]:
    return [load_plan(folder / "plans" / f"step-{step:06d}.npz").digest() for step in steps]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "calibration.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.exhaustive
@pytest.mark.forks_ranks
def test_plans_of_both_loaders_are_equal(measured: None, tmp_path: Path) -> None:
    local = run(config_of(tmp_path, "local", "local"))
    assert run(config_of(tmp_path, "ray", "ray")) == local
    assert digests(tmp_path / "ray") == digests(tmp_path / "local")
    assert lines(tmp_path / "ray") == lines(tmp_path / "local")
    assert lines(tmp_path / "ray")[-1]["speeds"][1] == pytest.approx(SPEEDS[1], abs=0.06)


@pytest.mark.exhaustive
@pytest.mark.forks_ranks
def test_plans_change_when_the_lag_has_passed(measured: None, tmp_path: Path) -> None:
    run(config_of(tmp_path, "calibrated", "local"))
    run(replace(config_of(tmp_path, "plain", "local"), cost=CostConfig(calibrate=False)))
    same = [a == b for a, b in zip(digests(tmp_path / "plain"), digests(tmp_path / "calibrated"), strict=True)]
    assert all(same[:3]), "steps before the lag has passed are planned with the first costs"
    assert not all(same), "the calibration changed no plan, so the other tests say nothing"


@pytest.mark.exhaustive
@pytest.mark.forks_ranks
def test_plans_after_a_kill_are_equal(measured: None, tmp_path: Path) -> None:
    """The other loader goes on from the states that the killed run has written."""
    for loader, other in (("local", "ray"), ("ray", "local")):
        killed = config_of(tmp_path, f"killed-{loader}", loader)
        interrupt(killed, after_step=8)
        before = digests(tmp_path / f"killed-{loader}", range(1, 8))
        run(with_trainer(replace(killed, data=replace(killed.data, loader=other)), resume=True))
        assert digests(tmp_path / f"killed-{loader}", range(1, 8)) == before
    assert digests(tmp_path / "killed-ray") == digests(tmp_path / "killed-local")
    assert lines(tmp_path / "killed-ray") == lines(tmp_path / "killed-local")
