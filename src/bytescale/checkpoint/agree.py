"""Errors that all ranks raise together: a rank that met none would wait for the others for ever.

Ranks may take very different times for what they do before they meet: one writes to a slow disk, another one has
nothing to write. While they do it, a thread of each rank exchanges a heartbeat with those of the others. So a rank that
is stopped is noticed within the group's time limit, however long a write may take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from bytescale.checkpoint.manifest import CheckpointDamage
from bytescale.common.errors import BytescaleError, CheckpointError, ConfigError, DiskFullError, RankFailure
from bytescale.runtime.group import limit_of, lost_ranks
from bytescale.runtime.plain_data import broadcast_json

_KINDS: dict[str, type[BytescaleError]] = {
    kind.__name__: kind for kind in (CheckpointError, CheckpointDamage, DiskFullError, ConfigError)
}
_BEATS = 6
"""Heartbeats within the time limit of a group."""
_MOST_SECONDS = 5.0
"""Between two of them."""


@contextmanager
def together(group: dist.ProcessGroup, *, what: str = "") -> Iterator[Callable[[], None]]:
    """What one rank raises in the block, all ranks raise behind it: the error of the lowest rank that has one.

    All ranks come here, also those that have nothing to do in the block. Nothing in the block uses ``group``.

    With ``what``, the block tells by calls of what is yielded that it gets on. If it does not within the group's time
    limit, all other ranks raise ``RankFailure``, with ``what`` it did.
    """
    beats = _Beats(group, what)
    error: Exception | None = None
    try:
        yield beats.progressed
    except Exception as raised:
        error = raised
    first = beats.end(error is not None)
    if first == group.size():
        return
    if error is not None and first == group.rank():
        broadcast_json([type(error).__name__, str(error)], group, first)
        raise error
    kind, text = broadcast_json(None, group, first)
    raise _KINDS.get(kind, CheckpointError)(text) from error


class _Beats:
    """The heartbeats of one block, on one rank. In every one, ranks tell who is done, who failed, and who is stuck."""

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self._group, self._what = group, what
        self._limit = limit_of(group, torch.device("cpu")).total_seconds()
        self._seconds = min(_MOST_SECONDS, self._limit / _BEATS)
        self._done, self._failed, self._moved = threading.Event(), False, time.monotonic()
        self._first = self._stuck = group.size()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="bytescale-heartbeat", daemon=True)
        if group.size() > 1:
            self._thread.start()

    def progressed(self) -> None:
        self._moved = time.monotonic()

    def end(self, failed: bool) -> int:
        """Wait until all ranks are here. Returns the lowest rank that failed, or the number of ranks.

        Raises ``RankFailure`` if a rank is gone, stopped or stuck.
        """
        self._failed = failed
        self._done.set()
        if self._group.size() == 1:
            return 0 if failed else 1
        self._thread.join()
        if self._error is not None:
            what = f"rank {self._group.rank()} lost the others while a checkpoint was written or read"
            raise lost_ranks(what, self._error) from self._error
        if self._stuck < self._group.size():
            raise RankFailure(
                f"rank {self._stuck} has been stuck for more than {self._limit:.0f} s: {self._what}",
                so="the others would wait for it for ever",
                fix="look at the disk or the store that it uses, then resume",
            )
        return self._first

    def _run(self) -> None:
        size, rank = self._group.size(), self._group.rank()
        try:
            while True:
                is_done = self._done.wait(self._seconds)
                is_stuck = not is_done and bool(self._what) and time.monotonic() - self._moved > self._limit
                told = torch.tensor([
                    int(is_done), rank if is_done and self._failed else size, rank if is_stuck else size
                ])  # fmt: skip
                dist.all_reduce(told, op=dist.ReduceOp.MIN, group=self._group)
                all_done, self._first, self._stuck = told.tolist()
                if all_done or self._stuck < size:
                    return
        except Exception as error:  # raised by `end`
            self._error = error
