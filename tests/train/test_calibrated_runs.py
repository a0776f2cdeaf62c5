"""Real runs that calibrate their costs: equal results, plans that can be made again, states that resume keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bytescale.config.schema import Config, CostConfig, PlannerConfig
from bytescale.cost.calibration import Calibrator, State
from bytescale.cost.model import CostModel
from bytescale.plan.io import load_plan
from bytescale.planner.calibrated import CalibratedPlanner
from bytescale.train.parts import job as parts
from tests.train.runs import described, interrupt, metrics, on_ranks, run, small_run, with_trainer, write_corpus


def calibrated(config: Config, calibrate: bool = True) -> Config:
    return replace(config, cost=CostConfig(calibrate=calibrate), planner=PlannerConfig())


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "calibration.jsonl").read_text(encoding="utf-8").splitlines()]


def test_losses_do_not_depend_on_calibration(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    runs = [calibrated(on_ranks(small_run(corpus, tmp_path / str(on)), 2, 128), on) for on in (False, True)]
    runs[1] = replace(runs[1], log=replace(runs[1].log, static_mesh=True))
    without, with_it = (run(config) for config in runs)
    assert with_it == pytest.approx(without, rel=1e-4)
    assert not (tmp_path / "False" / "calibration.jsonl").exists()
    assert all(line["predicted_seconds"] is None for line in metrics(tmp_path / "False"))
    assert all(line["predicted_seconds"] > 0 for line in metrics(tmp_path / "True"))
    assert all(line["static_seconds"] is None for line in metrics(tmp_path / "False"))
    # How the two compare depends on the costs just measured: the greedy plan may be the later one.
    assert all(line["static_seconds"] > 0 for line in metrics(tmp_path / "True"))
    assert any(line["static_seconds"] != line["predicted_seconds"] for line in metrics(tmp_path / "True"))
    lines = lines_of(tmp_path / "True")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["state"]["steps"] == 7
    assert lines[-1]["cost"]["token_seconds"] != lines[0]["cost"]["token_seconds"]


def test_every_plan_can_be_made_again_from_the_run_folder(tmp_path: Path) -> None:
    """Also after a kill: the run goes on with the states of its folder."""
    config = calibrated(on_ranks(small_run(write_corpus(tmp_path / "corpus"), tmp_path / "run", steps=9), 2, 128))
    interrupt(config, after_step=7)
    before = lines_of(tmp_path / "run")
    assert [line["step"] for line in before][-1] >= 6
    run(with_trainer(config, resume=True))
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert lines[:6] == before[:6]
    planner = planner_of(config)
    planner.states = {line["step"] - 1: State.from_dict(line["state"]) for line in lines}
    for step in range(9):
        saved = load_plan(tmp_path / "run" / "plans" / f"step-{step + 1:06d}.npz")
        assert planner.plan_step(saved.lengths, step).digest() == saved.digest()


def test_ranks_whose_processors_round_differently_plan_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    solve = Calibrator._solve

    def differently(*given: Any) -> tuple[float, ...]:
        pairs, *others = solve(*given)
        return (pairs * 1e4 ** dist.get_rank(), *others)

    monkeypatch.setattr(Calibrator, "_solve", differently)
    config = calibrated(on_ranks(small_run(write_corpus(tmp_path / "corpus"), tmp_path / "run", steps=10), 2, 128))
    assert len(run(config)) == 10


def planner_of(config: Config) -> CalibratedPlanner:
    """The planner of a run, made without its ranks."""

    from bytescale.train.parts.budget import rank_device
    from bytescale.train.parts.devices import Devices

    device, dtype = torch.device("cpu"), torch.float32
    devices = Devices.alike(rank_device(config, device, dtype, 2), 2)
    spec, memory = described(config)
    planning = parts.plan_of_run(config, spec, memory, devices, device=device, dtype=dtype, ranks_per_node=2)
    planner = planning.planner
    calibrator = Calibrator(first=planner.cost)
    return CalibratedPlanner(planner, calibrator)


def test_a_plan_whose_costs_are_not_known_is_refused() -> None:
    from bytescale.common.errors import LoaderFailure

    first = CostModel(attention_seconds_per_pair=1.0, token_seconds=1.0)
    planner = CalibratedPlanner(None, Calibrator(first=first))  # type: ignore[arg-type]
    with pytest.raises(LoaderFailure, match="Step 5 was to be planned before step 1 had ended"):
        planner.plan_step(np.array([1]), 4)
