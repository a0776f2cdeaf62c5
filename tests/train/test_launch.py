"""The launcher names the rank that failed first, and fits a config to the GPUs of the machine."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from bytescale.cli.train import _how_to_go_on
from bytescale.config.schema import Config, ParallelConfig, TrainerConfig
from bytescale.train.launch import processes
from bytescale.train.launch.forked import Copies
from bytescale.train.launch.processes import RankProcesses
from bytescale.train.launch.torchrun import _wait, rank_failure
from bytescale.train.loop.trainer import train
from bytescale.train.parts.devices import fit_to_gpus
from bytescale.train.stop import StopRequest
from tests.train.runs import small_run, write_corpus


def failure(exitcode: int, record: str = "", timestamp: int = 0) -> SimpleNamespace:
    message = {"message": record, "extraInfo": {}} if record else "<NONE>"
    return SimpleNamespace(exitcode=exitcode, message=message, timestamp=timestamp, pid=1000 + timestamp)


def test_a_killed_rank_is_named_before_those_that_lost_it() -> None:
    failures = {
        0: failure(1, "RankFailure: HDP rank 0 lost its slice-group peer", timestamp=1),
        1: failure(-signal.SIGKILL, timestamp=2),
        2: failure(-signal.SIGTERM, timestamp=3),
    }
    text = str(rank_failure(failures, lambda: "continue with `bytescale train --resume runs/x`"))
    assert text.startswith("Rank 1 (pid 1002) was killed by SIGKILL, perhaps out of memory.")
    assert "bytescale train --resume runs/x" in text


def test_an_exception_is_named_before_its_consequences() -> None:
    failures = {
        0: failure(1, "RankFailure: lost a peer", timestamp=1),
        3: failure(1, "IndexError: index 5 is out of range", timestamp=2),
    }
    assert "Rank 3 (pid 1002) failed with exit code 1: IndexError: index 5" in str(rank_failure(failures, lambda: "r"))


def test_bad_input_is_told_as_if_there_were_one_process() -> None:
    failures = {rank: failure(2, "DataError: The corpus is empty. To fix: ...") for rank in range(4)}
    assert str(rank_failure(failures, lambda: "r")) == "The corpus is empty. To fix: ..."


@pytest.mark.parametrize(
    ("num_gpus", "device", "ranks", "capacity"),
    [
        (0, "auto", 4, 2048),
        (1, "auto", 1, 8192),
        (3, "auto", 3, 2731),
        (8, "auto", 4, 2048),
        (1, "cpu", 4, 2048),
    ],
)
def test_fewer_gpus_than_ranks_keep_the_total_capacity(num_gpus: int, device: str, ranks: int, capacity: int) -> None:
    config = Config(
        parallel=ParallelConfig(ranks=4, capacity_tokens=2048),
        trainer=TrainerConfig(device=device),  # type: ignore[arg-type]
    )
    fitted = fit_to_gpus(config, num_gpus).parallel
    assert (fitted.ranks, fitted.capacity_tokens) == (ranks, capacity)


def test_ranks_that_the_launcher_ends_itself_have_not_failed(tmp_path: Path) -> None:
    """One fails; the other one does not hear SIGTERM, so it is killed. It was not out of memory."""

    def run(arguments: Sequence[str]) -> int:
        if os.environ["RANK"] == "0":
            time.sleep(1.0)
            return 3
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60.0)
        return 0

    ranks = RankProcesses(tmp_path, [], run, {"OMP_NUM_THREADS": "1"})
    with mock.patch.object(processes, "can_be_copied", return_value=True):
        ranks.start(range(2))
    failures = _wait(ranks, stop_seconds=1.0, silent_seconds=60.0)
    assert [(rank, failure.exitcode) for rank, failure in failures.items()] == [(0, 3)]


def test_a_rank_that_is_a_copy_ends_as_a_process_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit codes, signals, what is left to be done at the end, and the environment are those of a new process."""

    def run(arguments: Sequence[str]) -> int:
        if arguments[0] == "ends":
            atexit.register(print, f"at the end of rank {os.environ['RANK']}, with {torch.get_num_threads()} threads")
            return 0
        if arguments[0] == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if arguments[0] == "says why":
            raise SystemExit("this is why")
        raise KeyError(arguments[0])

    deeds = ("ends", "is killed", "says why", "fails")
    ranks = Copies(
        name="rank",
        entrypoint=run,  # type: ignore[arg-type]
        args={rank: ([deed],) for rank, deed in enumerate(deeds)},
        envs={rank: {"RANK": str(rank), "OMP_NUM_THREADS": "3"} for rank in range(len(deeds))},
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)),
    )
    ranks.start()
    codes = [handler.proc.wait(60.0) for handler in ranks.subprocess_handlers.values()]
    assert codes == [0, -signal.SIGKILL, 1, 1]
    written = capfd.readouterr()
    assert "at the end of rank 0, with 3 threads" in written.out
    assert "this is why" in written.err
    assert "KeyError: 'fails'" in written.err


@pytest.mark.exhaustive
def test_a_process_with_threads_is_not_copied() -> None:
    """What other threads hold, such as a lock, would be held for ever in the copy."""
    code = """if True:
        import threading, time, torch
        from bytescale.train.launch.forked import can_be_copied, prepare_for_copies
        prepare_for_copies()
        threading.Thread(target=time.sleep, args=(0.1,), daemon=True).start()  # as a progress bar's, about to end
        alone = can_be_copied()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print(alone, can_be_copied())
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split() == (["False"] if torch.cuda.is_available() else ["True"]) + ["False"]


@pytest.mark.parametrize(("steps", "early"), [(2, False), (3, True)])
def test_a_run_that_is_stopped_in_its_last_step_is_done(tmp_path: Path, steps: int, early: bool) -> None:
    """It says "done" and what to do next, or that it was stopped and where: never both."""
    config = small_run(write_corpus(tmp_path / "corpus"), tmp_path / "run", steps=steps)
    asked, lines = StopRequest(), list[str]()

    def hear(line: str) -> None:
        lines.append(line)
        asked.heard = asked.heard or line.startswith("1/")

    train(config, hear, stop=asked)
    assert asked.early is early
    assert any(line.startswith("stopped by a signal after step 2") for line in lines) is early
    assert any(line.startswith("next ") for line in lines) is not early
    assert "continue with" in _how_to_go_on(config)


def test_messages_name_a_resume_only_where_there_is_something_to_resume(tmp_path: Path) -> None:
    config = small_run(tmp_path / "corpus", tmp_path / "run")
    assert "no run folder yet" in _how_to_go_on(config)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    assert "no checkpoint yet" in _how_to_go_on(config)
