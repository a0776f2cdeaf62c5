"""Whole runs on the remote loader through the real command, stopped and killed in the middle, with the same losses.

``test_soak`` has deaths of servers, planner and ranks under torchrun.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from bytescale.config.load import config_to_toml
from bytescale.config.schema import Config
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.loading.record import check_record
from tests.train.record import times_expected, times_given
from tests.train.runs import on_ranks, run, small_run, with_trainer, write_corpus

COMMAND = [sys.executable, "-m", "bytescale", "train"]
STEPS = 24
# Sums in another order after a restart on fewer ranks (1e-7 each), amplified by a few AdamW steps; a token lost or
# doubled in one step moves its loss by more than 1e-2.
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_corpus(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[float]:
    return run(on_ranks(small_run(folder / "corpus", folder / "whole", steps=STEPS), 3, 128))


def ray_config(folder: Path, run_dir: Path) -> Config:
    config = on_ranks(small_run(folder / "corpus", run_dir, steps=STEPS), 3, 128)
    data = replace(config.data, loader="ray", servers=2, record=True)
    return replace(config, data=data, checkpoint=replace(config.checkpoint, every=1))


@contextmanager
def started(config: Config, ray_address: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command in the background; whatever is left of it in the end is killed."""
    path = Path(config.trainer.run_dir).with_suffix(".toml")
    path.write_text(config_to_toml(config), encoding="utf-8")
    environment = {**os.environ, "RAY_ADDRESS": ray_address, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*COMMAND, str(path), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def steps_done(config: Config) -> int:
    path = Path(config.trainer.run_dir) / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


def assert_every_token_was_given_once(config: Config, steps: int) -> None:
    """By the run's own record: every (document, token) of these steps, as often as the seed says."""
    corpus = prepare_corpus(config.data)
    folder = Path(config.trainer.run_dir) / "data"
    assert check_record(folder, steps, corpus, config.data).num_attempts > 1, "nothing was taken twice"
    expected = times_expected(corpus, config.data.shuffle_seed, steps, config.data.batch_tokens)
    assert times_given(folder, corpus, steps) == expected


@pytest.mark.exhaustive
def test_sigterm_saves_and_another_loader_goes_on(
    folder: Path, tmp_path: Path, ray_address: str, undisturbed: list[float]
) -> None:
    config = ray_config(folder, tmp_path / "run")
    config = replace(config, checkpoint=replace(config.checkpoint, every=0))  # only what SIGTERM makes it save
    with started(config, ray_address) as launcher:
        wait_until(lambda: steps_done(config) >= 4)
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 128 + signal.SIGTERM, output
    assert "stopped by SIGTERM" in output
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == f"step-{steps_done(config):06d}"
    local = replace(with_trainer(config, resume=True), data=replace(config.data, loader="local"))
    np.testing.assert_allclose(run(on_ranks(local, 2, 128)), undisturbed, rtol=TOLERANCE)
