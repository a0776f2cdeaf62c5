"""Restarts of a run: how many, on how many ranks, and when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale.common.errors import ConfigError, RankFailure, RanksRefused
from bytescale.config.schema import Config
from bytescale.train.launch import torchrun as launch
from bytescale.train.launch.supervise import supervise
from tests.train.runs import on_ranks, small_run


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Four ranks of 128 tokens for a context of 256."""
    return on_ranks(small_run(tmp_path / "corpus", tmp_path / "run"), 4, 128)


class Starts:
    """Fails as often as it is told, and writes down each attempt."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.attempts: list[tuple[int, bool]] = []

    def __call__(self, config: Config) -> None:
        self.attempts.append((config.parallel.ranks, config.trainer.resume))
        if self.failures:
            raise self.failures.pop(0)


def test_the_run_shrinks_and_grows_with_what_is_there(config: Config) -> None:
    start = Starts(*(RankFailure(f"rank {n} died") for n in range(3)))
    there = iter([2, 4, 3])
    lines: list[str] = []
    supervise(config, start, max_restarts=3, ranks_there=lambda _: next(there), print_line=lines.append)
    assert start.attempts == [(4, False), (2, True), (4, True), (3, True)]
    assert lines[:2] == ["rank 0 died", "restarting on 2 ranks; 2 restarts are left after this"]


def test_without_elastic_it_is_always_the_same_number(config: Config) -> None:
    start = Starts(RankFailure("one"), RankFailure("two"))
    supervise(config, start, max_restarts=2, print_line=lambda _: None)
    assert start.attempts == [(4, False), (4, True), (4, True)]


def test_the_last_failure_is_raised(config: Config) -> None:
    start = Starts(RankFailure("one"), RankFailure("two"))
    with pytest.raises(RankFailure, match="two"):
        supervise(config, start, max_restarts=1, print_line=lambda _: None)
    assert len(start.attempts) == 2


def test_bad_input_is_not_tried_again(config: Config) -> None:
    start = Starts(RanksRefused("the corpus is empty"))
    with pytest.raises(RanksRefused):
        supervise(config, start, max_restarts=5, print_line=lambda _: None)
    assert len(start.attempts) == 1


def test_too_few_ranks_for_the_context_end_the_run(config: Config) -> None:
    start = Starts(RankFailure("a node died"))
    with pytest.raises(ConfigError, match=r"1 of 4 ranks are left: .*256.*128.*bring the others back.*--resume"):
        supervise(config, start, max_restarts=5, ranks_there=lambda _: 1, print_line=lambda _: None)


def test_ranks_on_cpus_all_have_their_place_again(config: Config) -> None:
    assert launch.ranks_there(config) == 4


def test_gpus_are_counted_anew(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: True)
    config.trainer.device = "cuda"
    for gpus, expected in ((3, 3), (8, 4)):
        result = launch.subprocess.CompletedProcess([], 0, stdout=f"{gpus}\n")
        monkeypatch.setattr(launch.subprocess, "run", lambda *_, found=result, **__: found)
        assert launch.ranks_there(config) == expected
