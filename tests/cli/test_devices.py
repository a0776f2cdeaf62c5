"""``plan``, ``simulate`` and ``train`` agree about the memory that a config needs: one model, capacity and peak."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale.cli import plan, simulate
from bytescale.config.load import config_to_toml
from bytescale.config.schema import Config, MemoryConfig, ParallelConfig, PlannerConfig
from bytescale.config.validate import hdp_ranks
from bytescale.cost.assumed import ASSUMED
from bytescale.cost.memory.measured import MeasuredMemory
from bytescale.cost.profile import Profile
from bytescale.plan import Plan
from bytescale.runtime.usable import usable_device_bytes
from bytescale.train.loop.dry_run import dry_run
from bytescale.train.parts.budget import memory_budget, usable_host_bytes
from bytescale.train.parts.devices import Devices, RankDevice
from bytescale.train.parts.job import plan_of_run
from tests.train.runs import described, small_run, with_shape, with_trainer, write_corpus

ROOM = 1.0  # GiB: more tokens fit than a chunk of the loss or of the feed-forward part has


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


def run_of(
    corpus: Path,
    *,
    preset: str = "tiny",
    model: dict[str, Any] | None = None,
    gib: float | None = ROOM,
    parallel: Any = None,
    **trainer: Any,
) -> Config:
    config = with_trainer(small_run(corpus, corpus.parent / "run"), **trainer)
    return replace(
        config,
        model=replace(with_shape(config, **{"num_hidden_layers": 6, **(model or {})}).model, preset=preset),
        memory=MemoryConfig(device_gib=gib, offload="off"),
        parallel=ParallelConfig(**{"ranks": 4, "capacity_tokens": 0, **(parallel or {})}),
    )


def seen_by_plan(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, MeasuredMemory, float]:
    seen: list[tuple[int, MeasuredMemory, float]] = []

    def keep(made: Any, costs: Any) -> str:
        seen.append((int(made.capacity_tokens.max()), costs.memory, costs.usable_bytes))
        return ""

    monkeypatch.setattr(plan, "memory_in_words", keep)
    assert plan.run([*arguments, "--planners", "adaptive"]) == 0
    return seen[0]


def seen_by_simulate(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, float]:
    """Capacity, and bytes that a layer keeps of a token."""
    seen: list[tuple[int, float]] = []

    def keep(console: Any, step: Any, profile: Profile, made: Plan, cluster: Any) -> None:
        seen.append((int(made.capacity_tokens.max()), float(profile.activation_bytes(1.0))))

    monkeypatch.setattr(simulate, "print_step", keep)
    assert simulate.run([str(path)]) == 0
    return seen[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"gib": None},
        {"checkpointing": "attention", "parallel": {"pp": 2}, "dtype": "fp64"},
        {"checkpointing": "full", "parallel": {"tp": 2}, "preset": "tiny-moe", "model": {"intermediate_size": 64}},
        {"checkpointing": "full", "device": "cuda", "gib": 3, "dtype": "auto"},
        *(
            pytest.param(changes, marks=pytest.mark.exhaustive)
            for changes in (
                {},
                {"checkpointing": "full"},
                {"checkpointing": "attention", "parallel": {"tp": 2}},
                {"checkpointing": "full", "parallel": {"capacity_tokens": 300}},
                {"device": "auto", "dtype": "auto"},
            )
        ),
    ],
    ids=str,
)
def test_plan_and_simulate_count_as_train_does(
    changes: dict[str, Any], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    config = run_of(corpus, **changes)
    (tmp_path / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    on_gpu = config.trainer.device == "cuda" or (config.trainer.device == "auto" and torch.cuda.is_available())
    dtype = {"fp32": torch.float32, "fp64": torch.float64, "auto": torch.bfloat16 if on_gpu else torch.float32}
    device, chosen = torch.device("cuda" if on_gpu else "cpu"), dtype[config.trainer.dtype]
    ranks = config.parallel.ranks
    room = {
        "device_bytes": usable_device_bytes(device, ranks, config.memory.device_gib),
        "host_bytes": usable_host_bytes(config, ranks),
    }
    spec, memory = described(config, kind=device.type, dtype=chosen)  # type: ignore[arg-type]
    budget = memory_budget(
        config,
        memory,
        profile=ASSUMED["cpu"].profile(spec, bytes_per_element=4),
        device=device,
        devices=Devices.alike(RankDevice(name="any", **room), hdp_ranks(config.parallel)),
    )
    capacity, model, usable_bytes = seen_by_plan([str(tmp_path / "config.toml")], monkeypatch)
    simulated, kept = seen_by_simulate(tmp_path / "config.toml", monkeypatch)
    assert capacity == simulated == budget.capacity_tokens
    if config.memory.checkpointing != "none":
        assert kept == budget.model.layer_saved_bytes_per_token
    assert usable_bytes == budget.device_bytes
    assert model == budget.model
    for tokens in (100, capacity):
        ours = model.limits(device_bytes=usable_bytes).device_peak(tokens, 0, tokens)
        assert ours == budget.limits.device_peak(tokens, 0, tokens)


def test_the_memory_lines_of_plan_and_dry_run(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What both print of the model's own part, and the capacity."""
    config = run_of(corpus, parallel={"pp": 2}, checkpointing="full")
    (tmp_path / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    lines: list[str] = []
    dry_run(config, lines.append)
    memory = next(line for line in lines if line.startswith("memory"))
    plan.run([str(tmp_path / "config.toml"), "--planners", "adaptive"])
    printed = capsys.readouterr().out
    states = memory[memory.index("parameters") : memory.index(", activations")]
    capacity = memory.partition("micro-batch of ")[2].partition(" tokens")[0]
    assert states in printed
    assert f"ranks of {capacity} tokens" in printed


def test_the_plan_of_plan_and_dry_run(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One plan, by the same costs. In host memory it makes room where the run may: documents need fewer ranks then."""
    of_runs, cases = [], [("greedy", "on"), ("greedy", "off"), ("adaptive", "off")]
    for name, offload in cases:
        config = run_of(corpus, parallel={"capacity_tokens": 100})
        config = replace(
            config,
            memory=MemoryConfig(device_gib=ROOM, offload=offload),  # type: ignore[arg-type]
            planner=PlannerConfig(name=name),  # type: ignore[arg-type]
            data=replace(config.data, batch_tokens=4096),
        )
        (tmp_path / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
        lines: list[str] = []
        dry_run(config, lines.append)
        of_runs.append(next(line for line in lines if line.startswith("plan")).removeprefix("plan").strip())
        assert plan.run([str(tmp_path / "config.toml"), "--planners", name]) == 0
        assert of_runs[-1] in capsys.readouterr().out
    assert of_runs[0] != of_runs[1]


def test_a_dry_run_shares_parameters_among_the_ranks_that_a_run_shares_them_among(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four ranks on this node are two HDP ranks at tp = 2."""
    config = run_of(corpus, parallel={"tp": 2, "shard": "parameters", "capacity_tokens": 256}, dtype="fp32")
    lines: list[str] = []
    dry_run(config, lines.append)
    assert "in lockstep by 2 ranks" in next(line for line in lines if line.startswith("plan"))
    (tmp_path / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    assert plan.run([str(tmp_path / "config.toml"), "--planners", "adaptive"]) == 0
    assert "in lockstep by 2 ranks" in capsys.readouterr().out


def test_without_a_profile_plan_assumes_what_a_run_on_gpus_assumes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(corpus, parallel={"tp": 2}, device="cuda", dtype="auto", gib=3)
    (tmp_path / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    seen = list[Any]()
    monkeypatch.setattr(plan, "memory_in_words", lambda made, costs: seen.append(costs))
    assert plan.run([str(tmp_path / "config.toml"), "--planners", "adaptive", "--gpus-per-node", "4"]) == 0
    spec, memory = described(config, kind="cuda", dtype=torch.bfloat16)
    device = RankDevice(name="any", device_bytes=3 * 2.0**30, host_bytes=2.0**30)
    planning = plan_of_run(
        config, spec, memory, Devices.alike(device, 2), device=torch.device("cuda"), dtype=torch.bfloat16,
        ranks_per_node=2,
    )  # fmt: skip
    assert seen[0].cost_model == planning.planner.cost
    assert replace(seen[0].checkpointed_profile, name="flops") == planning.times.profile


def test_launches_that_rates_count_are_planned_for(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text(config_to_toml(run_of(corpus)), encoding="utf-8")
    seen = list[float]()
    monkeypatch.setattr(plan, "memory_in_words", lambda made, costs: seen.append(costs.cost_model.micro_batch_seconds))
    monkeypatch.setattr(plan.Console, "print", lambda *_, **__: None)
    for rates in ([], ["--rates.launch-seconds", "0.5"]):
        assert plan.run([str(tmp_path / "config.toml"), "--planners", "adaptive", *rates]) == 0
    assert seen == [3e-3, 4 * 6 * 0.5]


def test_without_a_profile_times_are_those_of_the_device_that_would_train(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(config_to_toml(run_of(corpus, gib=None)), encoding="utf-8")

    def step_seconds(*options: str) -> float:
        plan.run([str(tmp_path / "config.toml"), "--planners", "adaptive", "--json", *options])
        return float(json.loads(capsys.readouterr().out)["planners"]["adaptive"]["step_seconds"])

    assert step_seconds() > 5 * step_seconds("--trainer.device", "cuda")
    assert step_seconds("--rates.flops-per-second", "1e6") > 100 * step_seconds()
    for device, named in (("cpu", "a CPU core (--trainer.device cuda: of an H100)"), ("cuda", "an H100")):
        plan.run([str(tmp_path / "config.toml"), "--planners", "adaptive", "--trainer.device", device])
        assert f"times from the assumed rates of {named}\n" in capsys.readouterr().out


def test_checkpointing_without_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["--data.batch-tokens", "256K", "--data.context-length", "64K", "--parallel.ranks", "64"]
    small += ["--parallel.capacity-tokens", "auto", "--model.preset", "7b", "--model.config", "num_hidden_layers=2"]
    capacities = [
        seen_by_plan([*small, "--memory.checkpointing", mode], monkeypatch)[0] for mode in ("none", "attention", "full")
    ]
    assert capacities[0] < capacities[1] < capacities[2]
