"""Configs by name, and ``bytescale init``."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from bytescale.cli.main import main
from bytescale.cli.train import read_options
from bytescale.common.errors import ConfigError
from bytescale.config import Config, config_from_dict, load_config, validate
from bytescale.config.shipped import find_config, shipped_configs, starter_config


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_a_shipped_config_is_valid_and_loses_no_token(name: str) -> None:
    config = load_config(find_config(name))
    validate(config)
    assert config.data.over_length == "split"
    assert config.data.max_document_tokens is None
    assert config.data.min_document_tokens == 1


def test_the_first_run_shares_sequences_between_ranks() -> None:
    config = load_config(find_config("stdlib-tiny"))
    assert config.data.context_length == config.parallel.ranks * config.parallel.capacity_tokens
    assert config.parallel.ranks > 1
    assert config.trainer.steps >= 30


def test_a_file_of_the_users_comes_before_a_shipped_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdlib-tiny").mkdir()  # a folder is no config
    assert find_config("stdlib-tiny") == shipped_configs()["stdlib-tiny"]
    (tmp_path / "mine").write_text("[trainer]\nsteps = 3\n", encoding="utf-8")
    assert find_config("mine") == Path("mine")


def test_the_run_folder_is_named_after_the_config() -> None:
    options = read_options(["stdlib-tiny", "--trainer.steps", "7"])
    assert options.config.trainer.run_dir.startswith("runs/stdlib-tiny-")
    assert options.config.trainer.steps == 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stdlib-tny", r"no config file stdlib-tny.*did you mean stdlib-tiny\?"),
        ("configs/stdlib-tiny.toml", r"no config file configs/stdlib-tiny\.toml.*write `stdlib-tiny`"),
        ("mine.toml", r"no config file mine\.toml.*bytescale init.*known: stdlib-tiny"),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan", "simulate", "profile"])
def test_an_unknown_config_is_one_clear_error(
    command: str, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, name]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_init_writes_a_config_that_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    assert main(["init", str(path)]) == 0
    assert f"bytescale train {path}" in capsys.readouterr().out
    validate(load_config(path))


def test_init_writes_over_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("mine", encoding="utf-8")
    assert main(["init", str(path)]) == 2
    assert re.search(r"mine\.toml exists.*To fix: name another file", capsys.readouterr().err)
    assert path.read_text(encoding="utf-8") == "mine"
    assert main(["init", str(tmp_path / "nowhere" / "mine.toml")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_starters_commented_settings_are_the_defaults() -> None:
    """With every "# setting = value" made a setting, nothing changes: names exist, values are what holds anyway."""
    commented = re.sub(r"^# (?=\w+ = )", "", starter_config(), flags=re.MULTILINE)
    assert commented != starter_config()
    assert config_from_dict(tomllib.loads(commented)) == config_from_dict(tomllib.loads(starter_config()))


def test_an_unknown_starter_setting_would_be_found() -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        config_from_dict(tomllib.loads("[trainer]\nstepz = 1\n"))
    assert config_from_dict({}) == Config()
