"""A rank that is stopped ends the run within the time limit, in any phase, and the message says which one it was.

The rank stops itself (SIGSTOP) when it comes to a function. Runs are real: the command, its launcher and two ranks.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bytescale.cli.main import main
from bytescale.common import atomic
from bytescale.common.atomic import file_lock
from bytescale.common.errors import DataError
from bytescale.config.load import config_to_toml
from tests.helpers.command import Command
from tests.helpers.effort import one_of
from tests.train.runs import on_ranks, small_run, with_trainer, write_corpus

LIMIT = 5.0
"""``parallel.timeout_seconds`` of these runs."""
MORE = 10.0
"""Seconds that the end of the run may take beyond it."""


def stop_itself(place: str, note: Path) -> None:
    """Let rank 1 of the ranks that this process becomes stop where it comes to ``module:function``."""
    module, _, name = place.partition(":")
    owner, _, function = name.rpartition(".")
    holder = importlib.import_module(module)
    holder = getattr(holder, owner) if owner else holder
    before = getattr(holder, function)

    def stopping(*arguments: Any, **named: Any) -> Any:
        if os.environ.get("RANK") == "1":
            note.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return before(*arguments, **named)

    for known in list(sys.modules.values()):  # those that have imported the function, too
        if known.__name__.startswith("bytescale") and getattr(known, function, None) is before:
            setattr(known, function, stopping)
    setattr(holder, function, stopping)


PHASES = {
    "loading": "bytescale.data.loading.corpus:prepare_corpus",
    "step": "bytescale.runtime.executor:Executor.run",
    "checkpoint": "bytescale.checkpoint.writing:write_tensors",
    "evaluation": "bytescale.train.loop.evaluation:Evaluation.run",
    "upload": "bytescale.checkpoint.upload:Uploader._upload",
    "end": "bytescale.train.ranks:_meet_at_the_end",
}


@pytest.mark.parametrize("phase", one_of(list(PHASES), "checkpoint"))
def test_a_stopped_rank_ends_the_run(tmp_path: Path, phase: str) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    config = on_ranks(small_run(corpus, tmp_path / "run"), 2)
    config = with_trainer(config, steps=2, timeout_seconds=LIMIT)
    config = replace(config, checkpoint=replace(config.checkpoint, every=1))
    if phase == "evaluation":
        config = replace(config, eval=replace(config.eval, sources=(str(corpus),), every=1))
    if phase == "upload":
        config = replace(config, checkpoint=replace(config.checkpoint, folder="memory://store"))
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    note = tmp_path / "stopped"
    command = Command(["train", str(tmp_path / "config.toml")], lambda: stop_itself(PHASES[phase], note))
    out, errors = command.communicate(timeout=300)
    print(out, errors)
    seconds = time.time() - float(note.read_text())
    print(f"{phase}: {seconds:.1f} s")
    assert command.returncode == 1
    assert "Rank 1" in errors
    assert "was stopped (SIGSTOP)" in errors
    assert "out of memory" not in errors
    assert seconds < LIMIT + MORE


def test_a_lock_of_a_stopped_process_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "STOPPED_SECONDS", 0.5)
    lock = tmp_path / "lock"
    script = f"from bytescale.common.atomic import file_lock; from pathlib import Path; import time\n" \
             f"with file_lock(Path({str(lock)!r})): print('held', flush=True); time.sleep(60)"  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(DataError, match=rf"Process {holder.pid} holds .* and is stopped"), file_lock(lock):
                pass
        finally:
            holder.kill()
    with file_lock(lock):
        pass


def test_a_run_that_is_not_there_names_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.toml").write_text("")
    assert main(["train", "--resume", "runs/mien"]) == 2
    said = capsys.readouterr().err
    assert "There is no run in runs/mien" in said
    assert "runs/mine" in said


@pytest.mark.parametrize("place", ["/proc/x/y", "n" * 5000, "file/run"])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_run_folder_that_cannot_be_made_is_told_before_anything_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str, more: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    config = small_run(write_corpus(tmp_path / "corpus"), tmp_path / "run")
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    assert main(["train", "config.toml", "--trainer.run-dir", place, *more]) == 2
    assert "To fix" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_a_signal_while_data_is_prepared_is_answered(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(10):
        (corpus / f"{number}.txt").write_text("the ring moves keys " * 40_000)
    config = small_run(corpus, tmp_path / "run")
    (tmp_path / "config.toml").write_text(config_to_toml(replace(config, data=replace(config.data, tokenizer="bpe"))))
    running = Command(["train", str(tmp_path / "config.toml")])
    try:
        while not list(tmp_path.glob("cache/*/*.lock")):
            assert running.poll() is None
            time.sleep(0.05)
        running.terminate()
        _, said = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 143
    assert "stopped by SIGTERM before training began" in said
