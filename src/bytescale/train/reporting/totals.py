"""The numbers that ranks share once a step: sums and extremes go to all ranks, lists to the first rank alone.

At 16,384 ranks a table of everybody's numbers takes longer to read than to send. So sums and maxima are made on the way
(two all-reduces of some numbers), and what metrics.jsonl lists rank by rank goes to the rank that writes it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from bytescale.data.loading.loader import LoaderTimes
from bytescale.runtime import RankGroup


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Added up over ranks."""

    loss_sum: float
    num_targets: float
    batch_loss: float  # of a stage, told by one rank of it
    norm_share: float  # sum of squares of the rank's part of the gradient
    busy_seconds: float  # in forward and backward, without waiting for other ranks
    waiting_seconds: float  # in forward and backward, for other ranks
    sync_seconds: float  # until gradients are reduced, after the last backward
    bytes_sent: float  # attention traffic
    stop_heard: float  # 1: the rank was asked to stop

    @property
    def grad_norm(self) -> float:
        """Norm of the whole gradient."""
        return self.norm_share**0.5


@dataclass(frozen=True, kw_only=True)
class Maxima:
    """The maxima over ranks. Where the minimum is wanted, the field has its sign turned."""

    busy_seconds: float
    memory_bytes: float
    data_wait_seconds: float
    planning_seconds: float
    data_restarts: float
    minus_steps_ready: float
    minus_steps_planned: float


@dataclass(frozen=True)
class Report:
    """The figures of one rank, or of all ranks together.

    Attributes:
        bytes_read, bytes_received: of the rank's loader; of all ranks in rank order on the first rank, empty on others.
    """

    sums: Sums
    maxima: Maxima
    bytes_read: list[int]
    bytes_received: list[int]

    @staticmethod
    def of_rank(sums: Sums, times: LoaderTimes, *, memory_bytes: int) -> Report:
        """This rank's own."""
        maxima = Maxima(
            busy_seconds=sums.busy_seconds,
            memory_bytes=float(memory_bytes),
            data_wait_seconds=times.wait_seconds,
            planning_seconds=times.planning_seconds,
            data_restarts=float(times.restarts),
            minus_steps_ready=-float(times.steps_ready),
            minus_steps_planned=-float(times.steps_planned),
        )
        return Report(sums, maxima, [times.bytes_read], [times.bytes_received])

    def of_all(self, world: RankGroup) -> Report:
        """The same of all ranks together; called by every rank. Sums and maxima have the same bits on all of them."""
        sums = world.sum_of([float(number) for number in astuple(self.sums)])
        maxima = world.max_of([float(number) for number in astuple(self.maxima)])
        lists = world.gather_on_first([float(self.bytes_read[0]), float(self.bytes_received[0])])
        return Report(
            Sums(**dict(zip(Sums.__dataclass_fields__, sums, strict=True))),
            Maxima(**dict(zip(Maxima.__dataclass_fields__, maxima, strict=True))),
            [int(row[0]) for row in lists],
            [int(row[1]) for row in lists],
        )
