"""The launcher names the rank that failed first, and fits a config to the GPUs of the machine."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from bytescale.config import Config, ParallelConfig, TrainerConfig
from bytescale.train.launch.torchrun import rank_failure
from bytescale.train.parts.devices import fit_to_gpus


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
