"""Restarts of a run: how many, and when there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bytescale.cli import train
from bytescale.cli.train import TrainOptions, start_again
from bytescale.common.errors import RankFailure, RanksRefused
from bytescale.config.schema import Config
from tests.train.runs import on_ranks, small_run


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    return TrainOptions(config=on_ranks(small_run(tmp_path / "corpus", tmp_path / "run"), 4, 128))


class Starts:
    """Fails as often as it is told, and writes down each attempt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failures: Exception) -> None:
        self.failures = list(failures)
        self.attempts: list[tuple[int, bool]] = []
        monkeypatch.setattr(train, "_start_ranks", self)

    def __call__(self, config: Config, command: str) -> None:
        assert command == "train"
        self.attempts.append((config.parallel.ranks, config.trainer.resume))
        if self.failures:
            raise self.failures.pop(0)


def test_a_restart_goes_on_from_the_last_checkpoint(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = Starts(monkeypatch, RankFailure("rank 0 died"), RankFailure("two"))
    start_again(replace(options, max_restarts=3))
    assert start.attempts == [(4, False), (4, True), (4, True)]
    assert "rank 0 died\nstarting again; 2 restarts are left after this" in capsys.readouterr().out


def test_the_last_failure_is_raised(options: TrainOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Starts(monkeypatch, RankFailure("one"), RankFailure("two"))
    with pytest.raises(RankFailure, match="wo"):
        start_again(replace(options, max_restarts=1))
    assert len(start.attempts) == 2


def test_bad_input_is_not_tried_again(options: TrainOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Starts(monkeypatch, RanksRefused("the corpus is empty"))
    with pytest.raises(RanksRefused):
        start_again(replace(options, max_restarts=5))
    assert len(start.attempts) == 1
