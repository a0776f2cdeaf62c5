"""``bytescale plan`` and ``bytescale simulate``: their output, their files and their errors."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from bytescale.cli import plan, simulate
from bytescale.cli.costs import read_lengths
from bytescale.common.errors import ConfigError, DataError, PlanError
from bytescale.config.schema import Config
from bytescale.plan.io import load_plan, save_plan
from bytescale.plan.verify import verify
from bytescale.train.parts import describe
from tests.attention.test_grid import grid_plan

SMALL = ["--data.batch-tokens", "256K", "--data.context-length", "64K", "--cost.profile", "case-study"]
SHALLOW = [*SMALL[:4], "--model.preset", "7b", "--model.config", "num_hidden_layers=8"]
"""Each stage of a pipeline is measured by itself, which takes as long as the model has layers."""


@pytest.fixture(scope="module", autouse=True)
def described_once() -> Iterator[None]:
    """The same model is measured once for all tests of this file."""
    found: dict[str, Any] = {}
    describe_model = describe.describe_model

    def once(config: Config, *given: Any, **named: Any) -> Any:
        architecture, _, *others = given
        memory, parallel = config.memory, config.parallel
        key = repr((config.model, memory.checkpointing, memory.offload, parallel, architecture, others, named))
        if key not in found:
            found[key] = describe_model(config, *given, **named)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(describe, "describe_model", once)
        yield


def test_plan_prints_every_planner_and_what_would_help(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "[red] :smile:.npz"  # no markup
    arguments = [*SMALL, "--parallel.ranks", "32", "--parallel.tp", "2", "--save", str(file)]
    assert plan.run(arguments) == 0
    printed = capsys.readouterr().out
    for word in ("static", "naive", "paper", "adaptive", "critical sequence", "what would help", "bytes saved"):
        assert word in printed
    assert f"wrote {file}\n" in printed
    assert load_plan(file).num_ranks == 16


def test_plan_of_a_pipeline_that_no_device_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The plan cannot hang under 1F1B, and memory is that of the fullest stage."""
    path = tmp_path / "plan.npz"
    devices = [*SHALLOW, "--parallel.ranks", "128", "--parallel.tp", "2", "--parallel.pp", "4"]
    assert plan.run([*devices, "--save", str(path)]) == 0
    printed = capsys.readouterr().out
    for word in ("(tp 2 x pp 4 devices each)", "pipeline fills and drains", "memory with 2-byte numbers"):
        assert word in printed
    assert "more than the" not in printed
    verify(load_plan(path), num_stages=4)
    assert plan.run([*devices, "--memory.device-gib", "1"]) == 0
    assert "more than the 1 GiB of a device. To fix: use more devices" in capsys.readouterr().out


STAGES = [
    "--parallel.ranks",
    "64",
    "--parallel.tp",
    "2",
    "--parallel.pp",
    "2",
    "--data.batch-tokens",
    "1M",
]


def test_plan_of_stages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every planner is compared: those that could hang are aligned, as in training."""
    path = tmp_path / "plan.npz"
    assert plan.run([*SHALLOW, *STAGES, "--save", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "(tp 2 x pp 2 devices each)" in printed
    assert [line.split()[0] for line in printed.splitlines() if line.startswith(" naive")] == ["naive"]
    verify(load_plan(path), num_stages=2)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel.pp = 33 exceeds the model's 32 layers"):
        plan.run([*SMALL, "--parallel.ranks", "264", "--parallel.pp", "33"])


@pytest.mark.parametrize("option", ["tp", "pp"])
def test_a_layout_of_nothing_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"parallel.{option} is 0. To fix: use a whole number of at least 1"):
        plan.run([*SMALL, "--parallel.ranks", "16", f"--parallel.{option}", "0"])


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        plan.run([*SMALL, "--parallel.ranks", "32", "--parallel.tp", "2", "--json", "--planners", "static", "adaptive"])
        == 0
    )
    content = json.loads(capsys.readouterr().out)
    assert list(content["planners"]) == ["static", "adaptive"]
    assert content["planners"]["adaptive"]["step_seconds"] >= content["ideal_seconds"]


def test_plan_of_rollouts_tells_what_shared_prefixes_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four answers of 300 tokens to a prompt of 900: the last token of the prompt has a row in each of them."""
    lines = [
        {"prompt": [1] * 900, "turns": [{"tokens": [own] * 300, "logprobs": [-1.0] * 300}], "reward": 1.0}
        for own in range(2, 6)
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    arguments = [*SMALL, "--parallel.ranks", "2", "--batch.lengths", str(path), "--planners", "adaptive"]
    assert plan.run([*arguments, "--json"]) == 0
    saved = json.loads(capsys.readouterr().out)["shared_prefixes"]
    assert (saved["tokens"], saved["rows"]) in {(4800, 899 + 4 * 301), (4800, 2 * 899 + 4 * 301)}
    assert saved["seconds"] < 0.8 * saved["seconds_apart"]
    assert plan.run(arguments) == 0
    assert f"shared prefixes: {saved['rows']} rows in the place of 4800 tokens" in capsys.readouterr().out


def test_plan_of_a_length_file_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    np.save(tmp_path / "lengths.npy", np.array([5000, 300, 200, 100]))
    picture = tmp_path / "ranks.png"
    arguments = [
        "--batch.lengths",
        str(tmp_path / "lengths.npy"),
        "--parallel.ranks",
        "4",
        "--parallel.capacity-tokens",
        "2K",
    ]
    assert plan.run([*arguments, "--png", str(picture)]) == 0
    assert picture.stat().st_size > 1000
    assert "4 sequences of 5.47K tokens" in capsys.readouterr().out


def test_plan_of_a_text_file_on_an_odd_number_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lengths.txt").write_text("50, 3\n2 1")
    arguments = [
        "--batch.lengths",
        str(tmp_path / "lengths.txt"),
        "--parallel.ranks",
        "7",
        "--parallel.capacity-tokens",
        "8",
    ]
    assert plan.run(arguments) == 0
    assert "adaptive" in capsys.readouterr().out


def test_simulate_prints_the_books_and_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    arguments = [*SHALLOW, "--parallel.ranks", "64", "--parallel.tp", "2", "--parallel.pp", "2", "--trace", str(trace)]
    assert simulate.run(arguments) == 0
    printed = capsys.readouterr().out
    for word in ("64 devices as 16 ranks of tp 2 x pp 2", "pp bubble", "ring, exposed"):
        assert word in printed
    assert re.search(r"memory with 2-byte numbers: .* per device at the peak", printed)
    assert "model and batch are small" not in printed
    assert simulate.run([*SMALL, "--parallel.ranks", "1024"]) == 0
    assert "model and batch are small for so many devices" in capsys.readouterr().out
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize("command", [plan, simulate])
def test_capacity_auto_is_what_a_device_holds(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    devices = ["--parallel.ranks", "32", "--parallel.tp", "2"]
    assert command.run([*SMALL, *devices, "--parallel.capacity-tokens", "auto"]) == 0
    assert command.run([*SMALL, *devices, "--parallel.capacity-tokens", "auto", "--memory.device-gib", "40"]) == 0
    capsys.readouterr()
    with pytest.raises(ConfigError, match=r"need .* GiB a rank, of 10 GiB that a rank may use"):
        command.run([*SMALL, *devices, "--parallel.capacity-tokens", "auto", "--memory.device-gib", "10"])


@pytest.mark.exhaustive
def test_ranks_that_share_parameters_hold_what_single_ranks_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    devices = ["--parallel.ranks", "16", "--memory.device-gib", "40", "--parallel.capacity-tokens", "auto"]
    with pytest.raises(ConfigError, match=r"need .* GiB a rank, of 40 GiB that a rank may use"):
        plan.run([*SMALL, *devices])
    assert plan.run([*SMALL, *devices, "--parallel.shard", "parameters", "--json"]) == 0
    capsys.readouterr()
    with pytest.raises(ConfigError, match="domain of 3 ranks that share parameters does not divide 16 ranks"):
        plan.run([*SMALL, *devices, "--parallel.shard", "parameters", "--parallel.domain", "3"])


@pytest.mark.exhaustive
def test_experts_in_parallel_are_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A layer's experts are not open, so that a smaller device is enough."""
    devices = ["--model.preset", "mixtral-8x7b", "--parallel.ranks", "64", "--parallel.capacity-tokens", "auto"]
    devices += ["--parallel.shard", "parameters", "--memory.device-gib", "60", "--memory.checkpointing", "full"]
    with pytest.raises(ConfigError, match=r"need .* GiB a rank, of 60 GiB that a rank may use"):
        plan.run([*SMALL[:4], *devices])
    assert plan.run([*SMALL[:4], *devices, "--parallel.experts", "parallel", "--json"]) == 0


def test_checkpointing_takes_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Backward computes layers again: a third more where it is all of them. Plans are made for that."""
    seconds = []
    for checkpointing in ("none", "attention", "full"):
        arguments = [*SHALLOW, "--parallel.ranks", "8", "--memory.checkpointing", checkpointing, "--json"]
        assert plan.run([*arguments, "--planners", "adaptive"]) == 0
        found = json.loads(capsys.readouterr().out)
        seconds.append(found["planners"]["adaptive"]["step_seconds"])
        assert seconds[-1] < 1.1 * found["ideal_seconds"]
    none, attention, full = seconds
    assert 1.2 * none < full < 1.34 * none
    assert none < attention < full


def test_simulate_a_saved_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "plan.npz"
    plan.run([*SMALL, "--parallel.ranks", "32", "--parallel.tp", "2", "--planners", "naive", "--save", str(saved)])
    arguments = ["--plan", str(saved), "--cost.profile", "case-study", "--parallel.ranks", "32", "--parallel.tp", "2"]
    assert simulate.run(arguments) == 0
    assert "plan: naive" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("columns", "message"), [(3, "has 4 ranks in 3 columns.*divides the number of ranks"), (0, "is 0, below 1")]
)
def test_a_plan_with_a_shape_that_cannot_be_is_refused(tmp_path: Path, columns: int, message: str) -> None:
    saved = tmp_path / "plan.npz"
    save_plan(replace(grid_plan([4096], 4, 2), group_columns=np.array([columns])), saved)
    with pytest.raises(PlanError, match=message):
        simulate.run(["--plan", str(saved), "--cost.profile", "case-study", "--parallel.ranks", "4"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "12 -3", "entry 1 is -3"),
        ("a.txt", "12 x", "cannot be read"),
        ("a.json", "[1.5]", "entry 0 is 1.5"),
        ("a.json", '{"a": 1}', "does not hold a list"),
        ("a.txt", "", "does not hold a list"),
        ("missing.txt", None, "cannot be read"),
    ],
)
def test_files_that_hold_no_lengths(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_lengths(tmp_path / name)


def test_a_sequence_that_fits_nowhere_is_an_error_when_no_planner_can() -> None:
    with pytest.raises(PlanError, match="could not hold it"):
        plan.run([*SMALL, "--parallel.ranks", "4", "--parallel.tp", "2", "--parallel.capacity-tokens", "100"])


def test_devices_that_make_no_whole_rank() -> None:
    with pytest.raises(ConfigError, match="10 ranks are no multiple of tp = 4 x pp = 1"):
        simulate.run([*SMALL, "--parallel.ranks", "10", "--parallel.tp", "4"])


@pytest.mark.parametrize("command", [plan, simulate])
def test_a_profile_of_another_model_than_the_one_named(command: ModuleType) -> None:
    """Without a config too; how many layers there are is no matter."""
    model = ["--model.preset", "tiny"]
    with pytest.raises(ConfigError, match="Profile 'case-study' is of another model: its hidden_size is 4096"):
        command.run([*SMALL, *model])


def test_a_reader_that_stops_reading_ends_the_command_quietly() -> None:
    """``bytescale plan --help | head -1``."""
    command = [sys.executable, "-m", "bytescale", "plan", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        said = running.stderr.read().decode()
        assert running.wait(timeout=600) == 141
    assert said == ""
