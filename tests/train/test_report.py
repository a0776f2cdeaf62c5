"""The figures of a step: every rank gets sums and extremes, and only the first rank gets lists."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from bytescale.runtime.group import RankGroup
from bytescale.train.reporting.metrics import RankFigures
from tests.helpers.forks import run_forked


def figures_of(rank: int) -> RankFigures:
    return RankFigures(
        loss_sum=1.0 + rank,
        num_targets=10.0,
        batch_loss=0.5 * (rank == 0),
        norm_share=0.1,
        busy_seconds=float(rank),
        most_busy_seconds=float(rank),
        waiting_seconds=0.25 * rank,
        sync_seconds=1.0,
        attention_bytes_sent=100.0 * rank,
        stop_heard=float(rank == 2),
        memory_bytes=1000.0 - rank,
        data_wait_seconds=0.1 * rank,
        planning_seconds=0.0,
        data_restarts=2.0 - rank,
        data_steps_ready=5.0 - rank,
        data_bytes_read=[7 * rank],
    )


def test_sums_extremes_and_lists() -> None:
    def one_rank(rank: int) -> RankFigures:
        dist.init_process_group("gloo")
        figures = figures_of(rank).of_all(RankGroup(dist.group.WORLD))
        dist.destroy_process_group()
        return figures

    first, *others = run_forked(3, one_rank)
    assert first == RankFigures(
        loss_sum=6.0,
        num_targets=30.0,
        batch_loss=0.5,
        norm_share=others[0].norm_share,
        busy_seconds=1.0,
        most_busy_seconds=2.0,
        waiting_seconds=0.25,
        sync_seconds=1.0,
        attention_bytes_sent=300.0,
        stop_heard=1.0,
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
