"""The report of a step: every rank gets sums and extremes, and only the first rank gets lists."""

from __future__ import annotations

import torch.distributed as dist

from bytescale.data.loading.loader import LoaderTimes
from bytescale.runtime import RankGroup
from bytescale.train.reporting.totals import Report, Sums
from tests.helpers.forks import run_forked


def own_report(rank: int) -> Report:
    sums = Sums(
        loss_sum=1.0 + rank,
        num_targets=10.0,
        batch_loss=0.5 * (rank == 0),
        norm_share=0.1,
        busy_seconds=float(rank),
        waiting_seconds=0.25 * rank,
        sync_seconds=1.0,
        bytes_sent=100.0 * rank,
        stop_heard=float(rank == 2),
    )
    times = LoaderTimes(
        planning_seconds=0.0,
        reading_seconds=0.0,
        wait_seconds=0.1 * rank,
        bytes_read=7 * rank,
        bytes_received=rank,
        steps_ready=5 - rank,
    )
    return Report.of_rank(sums, times, memory_bytes=1000 - rank)


def test_sums_extremes_and_lists() -> None:
    def one_rank(rank: int) -> Report:
        dist.init_process_group("gloo")
        report = own_report(rank).of_all(RankGroup(dist.group.WORLD))
        dist.destroy_process_group()
        return report

    reports = run_forked(3, one_rank)
    assert reports[0].sums == Sums(
        loss_sum=6.0,
        num_targets=30.0,
        batch_loss=0.5,
        norm_share=reports[1].sums.norm_share,
        busy_seconds=3.0,
        waiting_seconds=0.75,
        sync_seconds=3.0,
        bytes_sent=300.0,
        stop_heard=1.0,
    )
    assert reports[0].maxima.busy_seconds == 2.0
    assert reports[0].maxima.memory_bytes == 1000.0
    assert reports[0].maxima.minus_steps_ready == -3.0
    assert (reports[0].bytes_read, reports[0].bytes_received) == ([0, 7, 14], [0, 1, 2])
    for other in reports[1:]:
        assert (other.sums, other.maxima) == (reports[0].sums, reports[0].maxima), "the same bits everywhere"
        assert (other.bytes_read, other.bytes_received) == ([], [])


def test_one_rank_alone() -> None:
    own = own_report(1)
    assert own.of_all(RankGroup()) == own
