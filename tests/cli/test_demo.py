"""``bytescale demo``, its config, and every command that it tells people to run."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from bytescale.cli.demo import GPUS, DemoOptions, simulate_at_scale, simulated_steps
from bytescale.cli.main import main
from bytescale.cli.train import read_options
from bytescale.common.errors import ConfigError
from bytescale.config.load import DEMO_CONFIG, from_dict, load_config
from bytescale.config.schema import Config
from bytescale.config.validate import validate
from bytescale.cost.links import Links
from bytescale.cost.profile import Profile
from tests.helpers.command import Command
from tests.helpers.llama import spec_of_llama
from tests.train.runs import metrics, write_corpus

COMPARED = re.compile(r"^ {10}(static|naive|adaptive) +(\d+\.\d+) +\S+ +\d+% +\S+ \S+ +(.*)$", re.MULTILINE)
"""A planner's row: its name, its seconds, and the loss of each batch."""
SMALL = ["--model.config", "num_hidden_layers=2", "hidden_size=32", "num_attention_heads=2", "num_key_value_heads=2"]
SMALL += ["intermediate_size=48", "--data.tokenizer", "bytes", "--data.context-length", "1K"]
SMALL += ["--data.batch-tokens", "2K", "--parallel.ranks", "2", "--parallel.capacity-tokens", "512"]
SMALL += ["--trainer.device", "cpu", "--trainer.steps", "2"]


def run(command: str) -> str:
    """What ``bytescale`` and its ranks print. It must succeed."""
    program, *arguments = shlex.split(command)
    assert program == "bytescale"
    copy = Command(arguments)
    printed, errors = copy.communicate(timeout=600)
    assert copy.returncode == 0, printed + errors
    return printed


def test_the_demo_and_all_that_it_suggests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On little text: planners are measured and simulated, losses are equal, and what is printed can be run."""
    write_corpus(tmp_path / "text", 80)
    (tmp_path / "text" / "long.txt").write_text("every rank waits for none of them " * 40, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    printed = run(shlex.join(["bytescale", "demo", "--data.sources", "text", *SMALL]))
    rows = COMPARED.findall(printed)
    assert [name for name, _, _ in rows] == ["static", "naive", "adaptive"]
    losses = [list(map(float, row.split())) for _, _, row in rows]
    assert np.ptp(losses, axis=0).max() <= 1.01e-4, "they are printed with four digits"
    assert len(losses[0]) == 3
    seconds = {name: float(row) for name, row, _ in rows}
    (told,) = re.findall(r"adaptive is (\S+) times as fast as static", printed)
    assert float(told) == pytest.approx(seconds["static"] / seconds["adaptive"], rel=0.1)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("demo-")
    assert len(metrics(folder)) == 2, "the comparison is no step of the run"
    assert (folder / f"{GPUS[-1]}-gpus.png").stat().st_size > 10_000
    assert re.search(rf"^ +{GPUS[-1]} .*times as fast", printed, re.MULTILINE)

    suggested = re.findall(r"^ {10}(bytescale .*)$", printed, re.MULTILINE)
    assert [command.split()[1] for command in suggested] == ["train", "report", "convert", "init"]
    resume, report, convert, init = (run(command) for command in suggested)
    assert "a rank holds 1024 tokens instead of 512" in resume
    assert len(metrics(folder)) == 4
    assert "report.html" in report
    assert "1 safetensors files" in convert
    assert "bytescale train my.toml" in init
    validate(load_config(tmp_path / "my.toml"))


@pytest.mark.exhaustive
def test_the_demo_shares_long_documents_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config as it is shipped: the first batch has whole sequences and shared ones, and loses no token."""
    cache = ["--data.cache-dir", str(tmp_path)]
    assert main(["demo", "--dry-run", "--trainer.device", "cpu", *cache]) == 0
    printed = capsys.readouterr().out
    (plan,) = re.findall(r"^plan .*", printed, re.MULTILINE)
    whole, shared = map(int, re.findall(r"(\d+) whole on one rank, (\d+) shared", plan)[0])
    assert whole > 20 * shared > 0
    assert not re.search("lost|dropped|truncated|left out", printed)


def test_the_config_has_a_long_tail_to_show() -> None:
    config = load_config(DEMO_CONFIG)
    validate(config)
    assert config.data.over_length == "split"
    assert config.data.context_length == config.parallel.ranks * config.parallel.capacity_tokens
    assert read_options([], DemoOptions, DEMO_CONFIG).config.trainer.run_dir.startswith("runs/demo-")


def test_without_matplotlib_the_demo_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it: a console takes ``[plot]`` for a style where it is not told otherwise."""
    write_corpus(tmp_path / "text", 80)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    places = ["--data.sources", str(tmp_path / "text"), "--data.cache-dir", str(tmp_path / "cache")]
    simulate_at_scale(read_options([*SMALL, *places], DemoOptions, DEMO_CONFIG).config)
    assert "no picture: Drawing needs matplotlib" in (printed := capsys.readouterr().out)
    assert printed.rstrip().endswith("To fix: pip install 'bytescale[plot]'.")


def test_the_simulated_gain_is_large() -> None:
    """A long tail on 64 modelled H100s: adaptive planning ends in less than half of a static mesh's time."""
    profile = Profile.from_flops(
        spec_of_llama("7b", vocab_size=4096),
        flops_per_second=400e12,
        attention_flops_per_second=300e12,
        links=Links(
            intra_node_bytes_per_second=300e9,
            inter_node_bytes_per_second=40e9,
            latency_seconds=1e-5,
            device_to_host_bytes_per_second=25e9,
            host_to_device_bytes_per_second=25e9,
        ),
    )
    lengths = np.array([200_000, 60_000, *[3000] * 240])
    steps = simulated_steps(lengths, 64, profile, context=524_288)
    assert list(steps) == ["static", "naive", "adaptive"]
    assert 2 * steps["adaptive"].step_seconds < steps["static"].step_seconds


@pytest.mark.parametrize("command", ["train", "plan", "simulate", "profile"])
def test_an_unknown_config_is_one_clear_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "mine.toml"]) == 2
    assert re.search(r"no config file mine\.toml.*bytescale init", capsys.readouterr().err)


def test_init_writes_a_config_that_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    assert main(["init", str(path)]) == 0
    assert f"bytescale train {path}" in capsys.readouterr().out
    validate(load_config(path))
    assert read_options([str(path)]).config.trainer.run_dir.startswith("runs/mine-")


def test_init_writes_over_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("mine", encoding="utf-8")
    assert main(["init", str(path)]) == 2
    assert re.search(
        r"mine\.toml exists\. It would be overwritten\. To fix: name another file", capsys.readouterr().err
    )
    assert path.read_text(encoding="utf-8") == "mine"
    assert main(["init", str(tmp_path / "nowhere" / "mine.toml")]) == 2
    assert re.search(r"no such file or directory\..*make the folder first", capsys.readouterr().err)


def test_the_commented_settings_are_the_defaults() -> None:
    """With every "# setting = value" made a setting, nothing changes: names exist, values are what holds anyway."""
    text = DEMO_CONFIG.read_text(encoding="utf-8")
    commented = re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)
    assert commented != text
    assert from_dict(Config, tomllib.loads(commented), "") == from_dict(Config, tomllib.loads(text), "")


def test_an_unknown_setting_would_be_found() -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        from_dict(Config, tomllib.loads("[trainer]\nstepz = 1\n"), "config")
    assert from_dict(Config, {}, "config") == Config()
