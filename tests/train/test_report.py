"""The figures of a step: every rank gets sums and extremes, and only the first rank gets lists."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bytescale.attention import clock
from bytescale.runtime.group import RankGroup
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.train.loop.trainer import train
from bytescale.train.reporting.metrics import RankFigures, StepSums
from tests.helpers.forks import run_forked
from tests.train.runs import small_run, write_corpus


def figures_of(rank: int) -> RankFigures:
    return RankFigures(
        busy_seconds=float(rank),
        most_busy_seconds=float(rank),
        waiting_seconds=0.25 * rank,
        sync_seconds=1.0,
        attention_bytes_sent=100.0 * rank,
        memory_bytes=1000.0 - rank,
        data_wait_seconds=0.1 * rank,
        planning_seconds=0.0,
        data_restarts=2.0 - rank,
        data_steps_ready=5.0 - rank,
        data_bytes_read=[7 * rank],
    )


def sums_of(rank: int) -> StepSums:
    return StepSums(
        loss_sum=1.0 + rank,
        num_targets=10.0,
        batch_loss=0.5 * (rank == 0),
        norm_share=0.12,
        stop_heard=float(rank == 2),
        ranks_waiting=float(rank == 0),
    )


def test_sums_extremes_and_lists() -> None:
    def one_rank(rank: int) -> tuple[StepSums, RankFigures]:
        dist.init_process_group("gloo")
        world = RankGroup(dist.group.WORLD)
        figures = sums_of(rank).of_all(world), figures_of(rank).of_all(world)
        dist.destroy_process_group()
        return figures

    found = run_forked(3, one_rank)
    sums, (first, *others) = [one for one, _ in found], [one for _, one in found]
    assert sums[0] == sums[1] == sums[2], "the same bits everywhere"
    assert sums[0] == StepSums(
        loss_sum=6.0, num_targets=30.0, batch_loss=0.5, norm_share=sums[0].norm_share, stop_heard=1.0, ranks_waiting=1.0
    )
    assert sums[0].grad_norm == pytest.approx(0.6)
    assert first == RankFigures(
        busy_seconds=1.0,
        most_busy_seconds=2.0,
        waiting_seconds=0.25,
        sync_seconds=1.0,
        attention_bytes_sent=300.0,
        memory_bytes=1000.0,
        data_wait_seconds=0.2,
        planning_seconds=0.0,
        data_restarts=2.0,
        data_steps_ready=3.0,
        data_bytes_read=[0, 7, 14],
    )
    for other in others:
        assert other == replace(first, data_bytes_read=[]), "the same bits everywhere"


def test_one_rank_alone() -> None:
    assert figures_of(1).of_all(RankGroup()) == figures_of(1)
    assert sums_of(1).of_all(RankGroup()) == sums_of(1)


def test_clocks_are_read_when_the_update_has_been_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has thousands of spans to read a step, and would have nothing to do meanwhile."""
    happened = []

    def noted(owner: Any, name: str, what: str) -> None:
        before = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *one, **named: (happened.append(what), before(*one, **named))[1])

    noted(ShardedOptimizer, "reduce_gradients", "reduce")
    noted(ShardedOptimizer, "update", "update")
    noted(clock, "seconds_between", "read")
    train(small_run(write_corpus(tmp_path / "corpus"), tmp_path / "run", steps=3), print_line=lambda line: None)
    order = [what for what, _ in itertools.groupby(happened)]
    assert order[order.index("reduce") :] == ["reduce", "update", "read"] * 3
