"""``plan`` and ``simulate`` of models; ``profile`` of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bytescale.attention import select_kernel
from bytescale.cli.main import main
from bytescale.config.description import ModelDescription
from bytescale.config.load import config_to_toml
from bytescale.config.schema import Config, MemoryConfig, ParallelConfig
from bytescale.cost.cluster import Cluster
from bytescale.cost.profile import Profile
from bytescale.cost.profile_file import load_profile
from bytescale.data.tokens.tokenizer import ByteTokenizer
from bytescale.hf.model.costs import spec_of
from bytescale.hf.model.interface import Attachment
from bytescale.hf.model.probe import probe
from bytescale.parity import small_model
from bytescale.planner.baselines import naive_plan
from bytescale.simulator import ClusterConfig, simulate
from bytescale.train.loop.dry_run import dry_run
from bytescale.train.parts import describe, large_model
from bytescale.train.parts.describe import describe_model
from tests.helpers.effort import one_of
from tests.train.runs import small_run, with_trainer, write_corpus

from .test_devices import seen_by_plan


def hf_folder(folder: Path, name: str, **changes: object) -> Path:
    small_model(name, dtype=torch.float32, vocab_size=320, **changes).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(ByteTokenizer().to_json(), encoding="utf-8")
    return folder


def test_plan_simulate_and_train_agree_about_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The capacity that ``plan`` finds is that of ``train --dry-run``; only config.json is needed to plan."""
    folder = hf_folder(tmp_path / "gemma2", "gemma2", sliding_window=16)
    config: Config = with_trainer(
        small_run(write_corpus(tmp_path / "corpus"), tmp_path / "run"), init=f"hf:{folder}", checkpointing="full"
    )
    config = replace(
        config,
        model=replace(type(config.model)(), preset=f"hf:{folder}"),
        memory=MemoryConfig(device_gib=0.1, offload="off"),
        parallel=ParallelConfig(ranks=1, capacity_tokens=0),
    )
    (tmp_path / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    dry_run(config)
    printed = capsys.readouterr().out
    (folder / "model.safetensors").unlink()
    capacity, memory, usable = seen_by_plan([str(tmp_path / "config.toml")], monkeypatch)
    assert usable == pytest.approx(0.1 * 2**30)
    assert capacity == memory.capacity_tokens(usable) > 0
    assert f"full micro-batch of {capacity / 1024:.3g}K tokens" in " ".join(printed.split())
    assert main(["simulate", str(tmp_path / "config.toml"), "--parallel.ranks", "2"]) == 0
    assert "what its windows reach" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe", "deepseek_v3"])
def test_the_simulator_counts_what_windows_reach(name: str) -> None:
    """On one rank, simulated compute is the planner's work of all sequences."""
    model = small_model(name, dtype=torch.float32)
    attachment = Attachment(model)
    profile = Profile.from_flops(
        spec_of(model, probe(model)), flops_per_second=1e9, attention_flops_per_second=2e9, bytes_per_element=4
    )
    attachment.detach()
    cost = profile.cost_model()
    assert bool(cost.windows) == (name == "gemma2")
    lengths = np.array([3, 700, 40, 90])
    plan = naive_plan(lengths, cluster=Cluster.uniform(1, 1000), cost=cost)
    step = simulate(plan, profile, ClusterConfig(num_gpus=1))
    assert float(step.compute.sum()) == pytest.approx(float(cost.work_seconds(lengths).sum()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--parallel.ranks", "3", "--parallel.tp", "3"], "4 heads, which 3 ranks do not share evenly"),
        (
            ["simulate", "--parallel.ranks", "8", "--parallel.pp", "8"],
            "parallel.pp = 8 exceeds the model's 2 layers",
        ),
        (["plan", "--cost.profile", "case-study"], "is of another model: its hidden_size"),
    ],
)
def test_what_a_model_cannot_have_is_refused_by_name(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hf_folder(tmp_path / "qwen3", "qwen3")
    assert main([*arguments, "--model.preset", f"hf:{folder}"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", one_of(["gemma2", "deepseek_v3"], "gemma2"))
def test_a_profile_of_a_model_of_transformers_is_measured_and_taken(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows and a soft cap, and values narrower than keys. Another model's layers are refused."""
    monkeypatch.setattr("bytescale.train.profiling.measurer.MIN_SECONDS", 0.002)
    folder, out = hf_folder(tmp_path / name, name), tmp_path / "profile.toml"
    model = ["--model.preset", f"hf:{folder}", "--trainer.device", "cpu"]
    assert main(["profile", *model, "--out", str(out), "--data.context-length", "512", "--seconds", "60"]) == 0
    profile = load_profile(str(out))
    assert {point.tokens for point in profile.points} == {256, 512}
    assert bool(profile.spec.windows) == (name == "gemma2")
    assert profile.attention_forward(512) > 0
    assert profile.rest_backward(512) > 0
    assert profile.cost_model().row_bytes_per_token > 0  # type: ignore[operator]
    batch = ["--batch.distribution", "github", "--data.batch-tokens", "8K", "--data.context-length", "2K"]
    planned = [*batch, "--parallel.ranks", "4", "--parallel.capacity-tokens", "1024", "--cost.profile", str(out)]
    assert main(["simulate", *model, *planned]) == 0
    other = hf_folder(tmp_path / "qwen3", "qwen3", hidden_size=48)
    assert main(["plan", "--model.preset", f"hf:{other}", *planned]) == 2
    assert "is of another model" in " ".join(capsys.readouterr().err.split())


def test_models_that_cannot_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be attached, and one that this machine cannot hold and that shapes alone do not describe."""
    folder = hf_folder(tmp_path / "xlstm", "xlstm")
    assert main(["plan", "--model.preset", f"hf:{folder}"]) == 2
    assert "mixes tokens" in " ".join(capsys.readouterr().err.split())
    folder = hf_folder(tmp_path / "gpt2", "gpt2")
    monkeypatch.setattr(describe, "machine_bytes", lambda: 1000.0)
    monkeypatch.setattr(large_model, "FEW_PARAMETERS", 0)
    assert main(["plan", "--model.preset", f"hf:{folder}", "--data.context-length", "128"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "this machine has 1000 B" in told
    assert "Tensor.item() cannot be called on meta tensors" in told


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("qwen3_moe", ParallelConfig(ranks=4, tp=2, pp=2)),
        pytest.param("gemma3_text", ParallelConfig(), marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3", ParallelConfig(pp=2, ranks=2), marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", ParallelConfig(), marks=pytest.mark.exhaustive),
    ],
)
def test_a_large_model_is_described_by_its_shapes(
    name: str, parallel: ParallelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with weights: the same counts and states, and what a row takes within 2 %."""
    config = Config(parallel=parallel, memory=MemoryConfig(offload="on"))
    layers: dict[str, object] = {"num_hidden_layers": 6}
    if name == "qwen3_next":
        layers["layer_types"] = ["linear_attention", "full_attention"] * 3
    architecture = ModelDescription(content=small_model(name, **layers).config.to_dict())
    cpu = torch.device("cpu")
    described = []
    for few in (10**8, 0):
        monkeypatch.setattr(large_model, "FEW_PARAMETERS", few)
        if not few:
            monkeypatch.setattr(describe, "machine_bytes", lambda: 0.0)  # weights would have no room
        kernel = select_kernel("auto", cpu, torch.bfloat16)
        described.append(describe_model(config, architecture, kernel, cpu, torch.bfloat16, num_ranks=1, kind="cuda"))
    (spec, memory), (other_spec, other) = described
    assert spec == other_spec
    for own, same in zip((memory, *memory.other_stages), (other, *other.other_stages), strict=True):
        assert own.states == same.states
        for measured, by_shapes in zip(astuple(own.rows), astuple(same.rows), strict=True):
            assert by_shapes == pytest.approx(measured, rel=0.02, abs=64)
        assert same.rows.movable_per_token > 0
        assert replace(own, rows=same.rows, other_stages=()) == replace(same, other_stages=())


@pytest.mark.exhaustive
def test_235_billion_parameters_are_planned_in_a_gibibyte(tmp_path: Path) -> None:
    """A model of the sizes of Qwen3-235B-A22B."""
    content = small_model("qwen3_moe").config.to_dict() | {
        "num_hidden_layers": 94, "hidden_size": 4096, "moe_intermediate_size": 1536, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "num_local_experts": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 2**20,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    code = (
        "import sys; from bytescale.cli.main import main; code = main(sys.argv[1:]);"
        "print(open('/proc/self/status').read()); sys.exit(code)"
    )
    batch = ["--data.context-length", "256K", "--data.batch-tokens", "4M", "--parallel.capacity-tokens", "32K"]
    command = ["plan", "--model.preset", f"hf:{tmp_path}", "--parallel.ranks", "64", *batch]
    finished = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=True, timeout=300
    )
    assert "438 GiB" in finished.stdout  # parameters, two bytes each
    assert int(re.findall(r"VmHWM:\s+(\d+) kB", finished.stdout)[0]) < 2**20


def test_documents_longer_than_a_table_of_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before ranks are started. What counts is how long documents may be."""
    folder = hf_folder(tmp_path / "gpt2", "gpt2")
    model = ["--model.preset", f"hf:{folder}", "--data.batch-tokens", "64K"]
    (tmp_path / "c.toml").write_text(f'[data]\nsources = ["{tmp_path}"]\n', encoding="utf-8")
    started = ["train", str(tmp_path / "c.toml"), "--trainer.run-dir", str(tmp_path / "run"), "--init", f"hf:{folder}"]
    started += ["--parallel.capacity-tokens", "32K"]
    for command in (["plan"], started):
        assert main([*command, *model, "--data.context-length", "32K"]) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert "data.context_length is 32768 tokens, and the model has a table of 128 positions" in told
        assert "set data.context_length to 128" in told
