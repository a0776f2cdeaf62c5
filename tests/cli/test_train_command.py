"""The real command with the real torchrun: a new user's run, a rank that dies, and errors about bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from bytescale.cli.main import main
from bytescale.cli.options import _OTHER_WORDS
from bytescale.cli.train import _prepare_data, read_options
from bytescale.common.errors import ConfigError
from bytescale.config.load import config_to_toml, load_config
from bytescale.config.removed import REMOVED
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import Config, ModelConfig, ParallelConfig
from tests.cli.test_private_runs import LOOPBACK, listening
from tests.helpers.command import Command
from tests.train.runs import losses, metrics, on_ranks, small_run, write_corpus

COMMAND = [sys.executable, "-m", "bytescale"]


def bytescale(*arguments: str, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_corpus(folder / "corpus")
    config = on_ranks(small_run(folder / "corpus", folder / "run"), 2, capacity_tokens=128)
    (folder / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    return folder


@pytest.mark.exhaustive
def test_train_then_resume_on_one_rank(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = bytescale("train", str(folder / "config.toml"), "--trainer.run-dir", str(run), "--trainer.steps", "4",
                      "--planner.name", "adaptive")  # fmt: skip
    assert first.returncode == 0, first.stderr
    assert re.search(r"ranks +2 x cpu \(float32\), capacity 128 tokens", first.stdout)
    assert re.search(r"plan +\d+ sequences of .* on 2 ranks by adaptive", first.stdout)
    assert len(re.findall(r"^\d/4 +\d\.\d{4} ", first.stdout, re.MULTILINE)) == 4
    assert f"bytescale train --resume {run}" in first.stdout

    second = bytescale("train", "--resume", str(run), "--trainer.steps", "6", "--parallel.ranks", "1",
                       "--parallel.capacity-tokens", "256")  # fmt: skip
    assert second.returncode == 0, second.stderr
    assert f"resuming after step 4 from {run}/checkpoints/step-000004" in second.stdout
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6]


def test_a_resumed_run_fits_itself_to_other_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the suggestion at a run's end promises. What the command line says is taken as it is."""
    run = folder / "shared"
    run.mkdir()
    config = on_ranks(small_run(folder / "corpus", run, shard="parameters", domain=4), 4, capacity_tokens=64)
    (run / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    resume = ["--resume", str(run), "--parallel.ranks"]
    for ranks, domain, capacity in ((4, 4, 64), (6, 2, 64), (3, 1, 86), (1, 1, 256)):
        fitted = read_options([*resume, str(ranks)]).config.parallel
        assert (fitted.domain, fitted.capacity_tokens) == (domain, capacity)
    assert "1 instead of 4 ranks share parameters, which divides 3 ranks" in capsys.readouterr().out
    asked = read_options([*resume, "3", "--parallel.domain", "2", "--parallel.capacity-tokens", "64"]).config.parallel
    assert (asked.domain, asked.capacity_tokens) == (2, 64)


def test_epochs_become_steps(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two passes over the corpus: its batches until the third pass begins. A resumed run may add a pass."""
    run = tmp_path / "run"
    assert main(["train", str(folder / "config.toml"), "--trainer.run-dir", str(run), "--trainer.epochs", "2",
                 "--parallel.ranks", "1", "--parallel.capacity-tokens", "256"]) == 0  # fmt: skip
    steps = int(re.search(r"epochs  2 of the data are (\d+) steps", capsys.readouterr().out)[1])
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    per_epoch = sum(len(file.read_bytes()) + 1 for file in (folder / "corpus").iterdir())
    seen = sum(line["num_tokens"] for line in lines)
    assert 2 * per_epoch <= seen < 2 * per_epoch + 640, "the last batch is filled up"
    assert main(["train", "--resume", str(run), "--trainer.epochs", "3", "--dry-run"]) == 0
    longer = capsys.readouterr().out
    more = int(re.search(r"epochs  3 of the data are (\d+) steps", longer)[1])
    assert more > steps
    assert f"run     {more} steps into {run}" in longer
    text = (folder / "config.toml").read_text()
    (tmp_path / "passes.toml").write_text(text.replace("epochs = 0", "epochs = 2"))
    asked = read_options([str(tmp_path / "passes.toml"), "--trainer.steps", "3"]).config.trainer
    assert (asked.steps, asked.epochs) == (3, 0), "what the command line says counts"
    assert read_options([str(tmp_path / "passes.toml"), "--optimizer.lr", "1"]).config.trainer.epochs == 2


@pytest.mark.exhaustive
def test_under_torchrun_it_is_used_as_found(folder: Path, tmp_path: Path) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    run = tmp_path / "run"
    arguments = ["train", str(folder / "config.toml"), "--trainer.run-dir", str(run), "--trainer.steps", "2"]
    finished = subprocess.run(
        [str(torchrun), "--nproc-per-node", "3", "--master-addr", "127.0.0.1", "-m", "bytescale", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, finished.stderr
    assert "ranks   3 x cpu" in finished.stdout
    assert len(losses(run)) == 2


MESH = ["--parallel.ranks", "4", "--parallel.tp", "2", "--parallel.pp", "2", "--parallel.capacity-tokens", "256"]


@pytest.mark.parametrize(
    ("num_ranks", "mesh"),
    [(2, []), pytest.param(4, MESH, marks=pytest.mark.exhaustive)],
    ids=["hdp", "pp2-tp2"],
)
def test_a_rank_that_dies_stops_the_others_and_is_named(
    folder: Path, tmp_path: Path, num_ranks: int, mesh: list[str]
) -> None:
    run, last = tmp_path / "run", num_ranks - 1
    config = [str(folder / "config.toml"), "--trainer.run-dir", str(run), *mesh]
    launcher = Command(["train", *config, "--trainer.steps", "100000"])
    try:
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(metrics_so_far(run)) >= 2, seconds=300)
        children = psutil.Process(launcher.pid).children(recursive=True)
        named = re.compile(r"bytescale-(\d+)")  # of copies of the launcher; other processes have a variable
        ranks = {int(found[1]): child for child in children if (found := named.fullmatch(child.name()))}
        ranks |= {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}
        told = [(child.name(), child.status(), child.cmdline()) for child in children], launcher.poll()
        assert sorted(ranks) == list(range(num_ranks)), told
        places = listening([psutil.Process(launcher.pid), *ranks.values()])
        assert len(places) >= num_ranks
        assert {host for host, _ in places} <= LOOPBACK
        ranks[last].send_signal(signal.SIGKILL)
        _, errors = launcher.communicate(timeout=600)
    finally:
        launcher.kill()
    assert launcher.returncode == 1
    assert re.search(
        rf"Rank {last} \(pid {ranks[last].pid}\) was killed by SIGKILL.*bytescale train --resume {run}", errors
    )
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.contxt-length", "9"], r"Unknown option --data.contxt-length.*did you mean --data.context-length\?"),
        (["--lr", "1e-3"], r"Unknown option --lr.*did you mean --optimizer.lr\?"),
        (["--planner.name", "adaptve"], r"--planner.name adaptve is not one of .*did you mean adaptive\?"),
        (["--set", "trainer.steps=9"], r"Unknown option --set.*--help lists the options"),
        (["--data.context-length", "1000"], r"1000 exceeds 2 ranks x .*capacity_tokens = 128.*at least 8 ranks"),
        (["--data.batch-tokens", "100"], r"batch_tokens = 100 is smaller than data.context_length = 256.*raise"),
        (["--data.sources", "/nowhere/*.txt"], r"/nowhere/\*\.txt"),
        (["--model.config", "vocab_size=64"], r"ids up to 256, but the model's vocab_size is 64"),
        (["--model.preset", "9b"], r"preset is '9b'.*use one of tiny, 160m"),
        (["--optimizer.options", "beta=0.9"], r"beta = 0.9, which adamw cannot .*betas = \[0.9, 0.95\], eps"),
        (["--data.tokenizer", "nope.json"], r"nope\.json"),
        (["--trainer.init", "somewhere"], r"trainer.init is 'somewhere'.*write hf:FOLDER or checkpoint:FOLDER"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(folder / "config.toml"), "--dry-run", *arguments]) == 2
    errors = capsys.readouterr().err
    assert re.search(message, errors, re.DOTALL), errors
    assert "To fix:" in errors


def test_a_dry_run_is_of_the_ranks_that_would_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fewer GPUs than ranks, each is a rank that holds more tokens. Packages that the run needs are looked for."""
    seen, refused = list[ParallelConfig](), ConfigError("there is no such package")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("bytescale.train.loop.dry_run.dry_run", lambda config: seen.append(config.parallel))
    arguments = ["--trainer.device", "auto", "--parallel.ranks", "2", "--parallel.capacity-tokens", "128"]
    assert main(["train", str(folder / "config.toml"), "--dry-run", *arguments]) == 0
    assert [(parallel.ranks, parallel.capacity_tokens) for parallel in seen] == [(1, 256)]
    monkeypatch.setattr("bytescale.train.reporting.trackers.check_trackers", Mock(side_effect=refused))
    assert main(["train", str(folder / "config.toml"), "--dry-run", *arguments]) == 2
    assert len(seen) == 1


def test_an_unknown_key_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[data]\nsorces = ["x"]\n', encoding="utf-8")
    assert main(["train", str(path)]) == 2
    errors = capsys.readouterr().err
    assert "unknown key data.sorces" in errors
    assert "did you mean sources?" in errors
    path.write_text('[trainer]\ncheckpointing = "full"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"unknown key trainer.checkpointing. .* did you mean memory.checkpointing\?"):
        load_config(path)


def test_a_setting_that_is_gone_says_what_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a file and as an option. A file with the value that holds now, as older runs wrote it, is read."""
    path = tmp_path / "c.toml"
    path.write_text("[data]\nread_retries = 2\n", encoding="utf-8")
    asked = [["train", str(path)], ["train", "--data.read-retries", "2"], ["plan", "--data.read_retries=2"]]
    for arguments in asked:
        assert main(arguments) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert "retries" in told
        assert "is a setting that is gone" in told
        assert "To fix: leave it out: a failing read is tried again 4 times" in told
    path.write_text("[model]\nnum_layers = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"write model.config = \{num_hidden_layers = ...\}"):
        load_config(path)
    path.write_text(
        "[optimizer]\noverrides = []\n[data]\nread_retries = 3\nchat_template_kwargs = ''\n"
        "[trainer]\nsave_plans = true\n",
        encoding="utf-8",
    )
    assert load_config(path) == Config()
    known = {f"{section.name}.{own.name}" for section in fields(Config) for own in fields(section.default_factory)}  # type: ignore[arg-type]
    assert not known & REMOVED.keys()


def test_a_table_stands_in_a_file_or_as_pairs(tmp_path: Path) -> None:
    path, again = tmp_path / "c.toml", tmp_path / "again.toml"
    path.write_text(
        "[optimizer]\noptions = {betas = [0.9, 0.99]}\n[model.config]\nhidden_size = 64\n", encoding="utf-8"
    )
    config = load_config(path)
    assert (config.optimizer.options, config.model.config) == ({"betas": [0.9, 0.99]}, {"hidden_size": 64})
    again.write_text(config_to_toml(config), encoding="utf-8")
    assert load_config(again) == config
    for wrong in ("2", "{day = 2026-11-27}", "{eps = nan}"):
        again.write_text(f"[optimizer]\noptions = {wrong}\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"optimizer\.options"):
            load_config(again)
    pairs = [
        "--optimizer.options",
        "eps=1e-6",
        "--model.config",
        "rope_theta=1e6",
        'rope_scaling={"rope_type": "linear"}',
    ]
    given = read_options(["--trainer.run-dir", "run", *pairs], default=path).config
    assert given.optimizer.options == {"eps": 1e-6}
    assert given.model.config == {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear"}}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"num_layers": 2}, "model.config has num_layers, and the config.json of tiny does not.*num_hidden_layers"),
        ({"vocab_size": "many"}, "model.config has vocab_size = 'many'.*a value such as 4096"),
        ({"num_hidden_layers": 0}, "model.config has num_hidden_layers = 0, which is not a whole number from 1"),
        ({"num_attention_heads": 3}, "hidden_size = 128 of model.config is not a multiple of num_attention_heads = 3"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 of model.config is not a multiple of num_key_value_he"),
        ({"rope_theta": -1.0}, "model.config has rope_theta = -1.0, which is not a number from 0 on"),
    ],
)
def test_fields_of_a_preset_that_cannot_be_are_refused_by_name(field: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_model(ModelConfig(config=field))


@pytest.mark.parametrize(
    ("command", "written", "meant"),
    [
        ("train", "--optimizer.learning-rate", "--optimizer.lr"),
        ("demo", "--optimizer.learning_rate=1", "--optimizer.lr"),
        ("train", "--max-steps", "--trainer.steps"),
        ("plan", "--tp", "--parallel.tp"),
        ("simulate", "--cluster.num-gpus", "--parallel.ranks"),
        ("simulate", "--cluster.tp", "--parallel.tp"),
        ("simulate", "--planner", "--planner.name"),
        ("profile", "--dtype", "--trainer.dtype"),
        ("data stats", "--tokeniser", "--tokenizer"),
        ("score", "--capacity-token", "--capacity-tokens"),
        ("train", "--num-train-epochs", "--trainer.epochs"),
        ("train", "--epochs", "--trainer.epochs"),
    ],
)
def test_a_wrong_option_suggests_the_right_one(
    command: str, written: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One vocabulary in all commands; words of other frameworks are understood."""
    assert main([*command.split(), written, "2"]) == 2
    assert re.search(rf"(write|did you mean) {re.escape(meant)}[.?]$", capsys.readouterr().err.strip())


def test_the_words_of_other_frameworks_stand_for_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Help is short; what it leaves out is one word away."""
    names = {}
    for argument in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main(["plan", argument])
        printed = capsys.readouterr().out
        names[argument] = set(re.findall(r"--[a-z][\w.-]+", printed))
        assert len(printed.splitlines()) < (100 if argument == "--help" else 1000)
    assert {f"--{option}" for option in _OTHER_WORDS.values()} <= names["--help-all"]
    assert (
        {"--parallel.tp", "--planner.name", "--batch.lengths"} <= names["--help"] < names["--help-all"] | {"--help-all"}
    )


def test_ranks_of_torchrun_do_not_name_run_folders(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(folder / "config.toml"), "--trainer.run-dir", ""]) == 2
    assert "trainer.run_dir is empty, and this process is one rank of several" in capsys.readouterr().err


def test_help_and_unknown_commands() -> None:
    """The real command, whose errors leave no stack trace."""
    assert "bytescale COMMAND --help" in bytescale("--help").stdout
    wrong = bytescale("trian")
    assert wrong.returncode == 2
    assert "did you mean train?" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def metrics_so_far(run: Path) -> list[dict]:
    """The complete lines of a file that is being written."""
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)


def test_the_launcher_tokenises_for_new_runs_only(tmp_path: Path) -> None:
    """Where a run goes on, ranks tokenise what its checkpoint needs, which may be far behind the first window."""
    write_corpus(tmp_path / "corpus")
    config = small_run(tmp_path / "corpus", tmp_path / "run")
    config = replace(config, data=replace(config.data, cache_dir=str(tmp_path / "cache")))
    _prepare_data(replace(config, trainer=replace(config.trainer, resume=True)))
    assert not list((tmp_path / "cache").rglob("*.bin"))
    _prepare_data(config)
    assert list((tmp_path / "cache").rglob("*.bin"))
