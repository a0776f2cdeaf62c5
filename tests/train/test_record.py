"""The record of the tokens that ranks were given, through interruptions and on other numbers of ranks."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bytescale.common.errors import ConfigError, DataError
from bytescale.config.load import config_to_toml
from bytescale.config.schema import Config
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.loading.record import RecordCheck, check_record
from bytescale.train.run_folder import RunFolder
from tests.train.record import times_expected, times_given
from tests.train.runs import interrupt, losses, on_ranks, run, small_run, with_trainer, write_corpus

STEPS = 12


def recorded(config: Config) -> Config:
    return replace(config, data=replace(config.data, record=True))


def check(config: Config, steps: int = STEPS) -> RecordCheck:
    return check_record(Path(config.trainer.run_dir) / "data", steps, prepare_corpus(config.data), config.data)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def three_steps(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of two ranks that was recorded."""
    config = on_ranks(recorded(small_run(corpus, tmp_path_factory.mktemp("three") / "run", steps=3)), 2)
    run(config)
    return config


@pytest.fixture
def copied(three_steps: Config, tmp_path: Path) -> Config:
    shutil.copytree(three_steps.trainer.run_dir, tmp_path / "run")
    return with_trainer(three_steps, run_dir=str(tmp_path / "run"))


@pytest.mark.exhaustive
def test_every_token_range_is_counted_through_deaths_and_other_numbers_of_ranks(corpus: Path, tmp_path: Path) -> None:
    """A rank dies on 2, the run goes on with 3, dies again, ends on 1; steps since a checkpoint were taken twice."""
    config = recorded(small_run(corpus, tmp_path / "run", steps=STEPS))
    interrupt(on_ranks(config, 2, 128), after_step=5)
    interrupt(on_ranks(with_trainer(config, resume=True), 3, 128), after_step=8)
    run(with_trainer(config, resume=True))
    found = check(config)
    assert found.num_attempts == 3
    assert found.num_steps == STEPS
    opened = prepare_corpus(config.data)
    given = times_given(tmp_path / "run" / "data", opened, STEPS)
    assert given == times_expected(opened, config.data.shuffle_seed, STEPS, config.data.batch_tokens)
    assert sum(given.values()) == found.num_tokens


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda line: None, r"has 1 of 2 ranks' records of step 1\. .*data.record = true from their first step"),
        (
            lambda line: {**line, "segments": line["segments"][1:]},
            r"Step 1: its ranks were given \d+ tokens, which are not",
        ),
        (
            lambda line: {**line, "segments": line["segments"][:1] * 2 + line["segments"][1:]},
            r"which are not exactly the",
        ),
        (
            lambda line: {**line, "segments": [[*line["segments"][0][:3], 7], *line["segments"][1:]]},
            r"Step 1: tokens \d+ to \d+ of a sample of document \d+ of part 0 differ",
        ),
    ],
    ids=["lost line", "lost tokens", "doubled tokens", "other tokens"],
)
def test_what_is_wrong_in_a_record_is_found(
    copied: Config, tmp_path: Path, damage: Callable[[dict], dict | None], message: str
) -> None:
    assert check(copied, 3).num_tokens > 0
    path = tmp_path / "run" / "data" / "attempt-0001" / "rank-00001.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    changed = [damage(line) if line["step"] == 1 else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed if line), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        check(copied, 3)


def test_a_resumed_run_may_change_the_size_of_its_batches(copied: Config) -> None:
    larger = replace(copied, data=replace(copied.data, batch_tokens=1024))
    run(with_trainer(larger, resume=True, steps=5))
    assert check(copied, steps=5).num_attempts == 2, "by the config of the first attempt"


def test_a_line_that_was_cut_off_does_not_count(copied: Config, tmp_path: Path) -> None:
    path = tmp_path / "run" / "data" / "attempt-0001" / "rank-00000.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + '{"step": 3, "num_ra', encoding="utf-8")
    assert check(copied, 3).num_steps == 3
    with pytest.raises(DataError, match="has 0 of all ranks' records of step 3"):
        check(copied, 4)


def test_two_runs_never_write_to_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bytescale.train.run_folder._LOCK_SECONDS", 0.2)
    folder = RunFolder(tmp_path / "run")
    with (
        folder.lock(),
        pytest.raises(ConfigError, match=r"Another run is writing to .*run. .*To fix: wait for it"),
        folder.lock(),
    ):
        pass
    with folder.lock():  # and it is free again
        pass


def test_a_file_system_without_locks_is_told_of_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("bytescale.train.run_folder.fcntl.flock", refuse)
    with RunFolder(tmp_path / "run").lock():
        assert "has no locks ([Errno 37] No locks available): see that no other run writes there" in caplog.text


@pytest.mark.exhaustive
def test_ranks_end_with_a_killed_launcher_and_the_run_goes_on(corpus: Path, tmp_path: Path) -> None:
    """kill -9 of the launcher, twice: in the middle of training, and while its ranks still import."""
    config = on_ranks(recorded(small_run(corpus, tmp_path / "run", steps=40)), 2)
    whole = run(with_trainer(config, run_dir=str(tmp_path / "whole")))
    path = tmp_path / "run.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    command = [sys.executable, "-m", "bytescale"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def kill_when(condition: Callable[[list[psutil.Process]], bool], *arguments: str) -> None:
        launcher = psutil.Popen([*command, "train", *arguments], env=environment, stdout=subprocess.DEVNULL)
        ranks: list[psutil.Process] = []
        try:
            deadline = time.monotonic() + 300
            while not condition(ranks := launcher.children(recursive=True)):
                assert time.monotonic() < deadline, "it did not come that far"
                time.sleep(0.01)
        finally:
            launcher.kill()
            launcher.wait()
        _, alive = psutil.wait_procs([rank for rank in ranks if rank.is_running()], timeout=60)
        left = [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE]
        for rank in left:
            rank.kill()
        assert len(ranks) == 2
        assert not left, "ranks trained on without their launcher"

    metrics = tmp_path / "run" / "metrics.jsonl"
    kill_when(lambda ranks: metrics.exists() and metrics.read_text().count("\n") >= 5, str(path))
    kill_when(lambda ranks: len(ranks) == 2, "--resume", str(tmp_path / "run"))
    ended = subprocess.run([*command, "train", "--resume", str(tmp_path / "run")], env=environment, timeout=600)
    assert ended.returncode == 0
    assert losses(tmp_path / "run") == whole
    audit = subprocess.run([*command, "data", "audit", str(tmp_path / "run")], capture_output=True, text=True)
    assert re.match(r"40 steps in \d attempts: \d+ tokens, all as in the corpus, none lost, none doub", audit.stdout)
