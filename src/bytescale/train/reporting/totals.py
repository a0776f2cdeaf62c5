"""The numbers that ranks share once a step: sums and extremes go to all ranks, lists to the first rank alone.

At 16,384 ranks a table of everybody's numbers takes longer to read than to send. So sums and maxima are made on the way
(two all-reduces of some numbers), and what metrics.jsonl lists rank by rank goes to the rank that writes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from bytescale.runtime import RankGroup

_SUM, _MAX, _MIN, _LIST = ({"over": how} for how in ("sum", "max", "min", "list"))
"""How the figures of all ranks become one."""


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """The figures of one rank, or of all ranks together (``of_all``)."""

    loss_sum: float = field(metadata=_SUM)
    num_targets: float = field(metadata=_SUM)
    batch_loss: float = field(metadata=_SUM)  # of a stage, told by one rank of it
    norm_share: float = field(metadata=_SUM)  # sum of squares of the rank's part of the gradient
    busy_seconds: float = field(metadata=_SUM)  # in forward and backward, without waiting for other ranks
    most_busy_seconds: float = field(metadata=_MAX)  # the same
    waiting_seconds: float = field(metadata=_SUM)  # in forward and backward, for other ranks
    sync_seconds: float = field(metadata=_SUM)  # until gradients are reduced, after the last backward
    bytes_sent: float = field(metadata=_SUM)  # attention traffic
    stop_heard: float = field(metadata=_SUM)  # 1: the rank was asked to stop
    memory_bytes: float = field(metadata=_MAX)
    data_wait_seconds: float = field(metadata=_MAX)
    planning_seconds: float = field(metadata=_MAX)
    data_restarts: float = field(metadata=_MAX)
    steps_ready: float = field(metadata=_MIN)
    bytes_read: list[int] = field(
        metadata=_LIST
    )  # of the rank's loader; of all ranks in rank order, empty but on the first
    bytes_received: list[int] = field(metadata=_LIST)  # likewise

    @property
    def grad_norm(self) -> float:
        """Norm of the whole gradient."""
        return self.norm_share**0.5

    def of_all(self, world: RankGroup) -> RankFigures:
        """Those of all ranks together; called by every rank. Sums and extremes have the same bits on all of them."""
        sums, maxima, minima, lists = (
            {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.metadata["over"] == how}
            for how in ("sum", "max", "min", "list")
        )
        added = world.sum_of([float(number) for number in sums.values()])
        most = world.max_of([float(number) for number in (*maxima.values(), *(-one for one in minima.values()))])
        rows = world.gather_on_first([float(one[0]) for one in lists.values()])
        found: dict[str, Any] = dict(zip((*sums, *maxima), (*added, *most), strict=False))
        found |= {name: -number for name, number in zip(minima, most[len(maxima) :], strict=True)}
        found |= {name: [int(row[place]) for row in rows] for place, name in enumerate(lists)}
        return RankFigures(**found)
