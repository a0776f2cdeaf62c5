"""A group of ranks: every collective and every message of training goes through one of these.

``runtime.mesh`` has the groups. No collective lies between micro-batches: ranks check that they agree before the first
forward, and share statistics after the last backward. ``runtime.optimizer.buckets`` says when gradients are reduced and
parameters gathered. A load-balancing loss of experts adds one sum of a few KB after the last backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

from bytescale.attention import Exchange
from bytescale.attention.clock import make_clock
from bytescale.common.errors import RankFailure, RanksLost

# torch 2.13 renamed these two functions and warns about the old names; torch 2.11 knows only the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


ABORTED = threading.Event()
"""While it is set, operations of this process were ended (``runtime.watch``): what they leave is no result."""


@dataclass
class PendingCollective:
    """A collective that has been started. Nobody may touch its tensors before ``wait`` returns."""

    group: RankGroup
    work: dist.Work | None  # None: there is a single rank

    def wait(self) -> None:
        """Wait for the result: the host blocks (CPU), or the current CUDA stream waits. Raises ``RankFailure``."""
        work, self.work = self.work, None
        if work is not None:
            self.group.timed(work.wait)


class RankGroup:
    """One rank's view of a group. With ``group=None`` there is a single rank and nothing is sent."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        name: str = "HDP",
        members: Sequence[int] | None = None,
    ) -> None:
        """``name``: what error messages call the group. ``members``: what its ``Exchange`` calls the ranks."""
        self.group = group
        self.name = name
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.device = device or torch.device("cpu")
        self.clock = make_clock(self.device)  # of collectives; messages have their own
        self.members = members
        self.exchange = self.make_exchange(batched=self.device.type == "cuda")

    def make_exchange(self, *, batched: bool) -> Exchange:
        rank, clock = self.rank if self.members is None else self.members[self.rank], make_clock(self.device)
        return Exchange(self.group, rank, batched=batched, name=self.name, clock=clock, members=self.members)

    def make_part(self, name: str, ranks: Sequence[int], options: Any = None) -> dist.ProcessGroup:
        """A communicator of some ranks of this group, with its time limit. Those ranks alone call it.

        ``options``: of the backend, for a group that PyTorch knows.
        """
        assert self.group is not None, "a single rank has no parts"
        limit = limit_of(self.group, self.device)
        if self.group in _world.pg_map:
            known = dist.get_process_group_ranks(self.group)
            members = [known[rank] for rank in ranks]
            with _without_split(self.size):
                made = dist.new_group(
                    members, timeout=limit, pg_options=options, use_local_synchronization=True, group_desc=name
                )
            if self.device.type == "cuda":  # connected while no rank waits: the first message may be between two alone
                dist.all_reduce(torch.zeros(1, device=self.device), group=made)
            return made
        store = self.group.get_group_store()
        number = store.add(f"{name}/made by {self.rank}", 1)  # the same on all of its ranks
        store, seconds = dist.PrefixStore(f"{name}/{number}", store), limit.total_seconds()
        return gloo_group(store, list(ranks).index(self.rank), len(ranks), seconds)

    def reduce_scatter(self, full: Tensor) -> Tensor:
        """Sum ``full [size * n, ...]`` over ranks; returns this rank's ``[n, ...]`` part."""
        if self.group is None:
            return full
        shard = full.new_empty(full.shape[0] // self.size, *full.shape[1:])
        if full.is_meta:  # a tensor of a shape alone, here and below
            return shard
        self.timed(lambda: _reduce_scatter(shard, full, group=self.group))
        return shard

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        """Fill ``full [size * n, ...]`` with every rank's ``shard [n, ...]``, in rank order."""
        if full.is_meta:
            return
        if self.group is None:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return
        self.timed(lambda: _all_gather(full, shard, group=self.group))

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send ``sent[r]`` of ``rows [R, ...]`` to rank r, in rank order. Returns the ``received`` ones, likewise."""
        if self.group is None:
            return rows
        arrived, leaving = rows.new_empty(sum(received), *rows.shape[1:]), rows.contiguous()
        self.timed(lambda: dist.all_to_all_single(arrived, leaving, list(received), list(sent), group=self.group))
        return arrived

    def start_reduce_scatter(self, full: Tensor) -> PendingCollective:
        """Start to sum ``full [size * n]`` over ranks, in place; only this rank's part ``[n]`` is defined then."""
        if self.group is None or full.is_meta:
            return PendingCollective(self, None)
        if self.device.type == "cuda":
            return self._start(lambda: _reduce_scatter(self._own(full), full, group=self.group, async_op=True))
        # gloo's reduce-scatter is this all-reduce on a copy, which it makes before it returns (torch 2.13).
        return self._start(lambda: dist.all_reduce(full, group=self.group, async_op=True))

    def start_all_gather(self, full: Tensor, own: Tensor | None = None) -> PendingCollective:
        """Start to fill ``full [size * n]`` with every rank's ``own [n]``; None: its own part of ``full``."""
        if self.group is None or full.is_meta:
            return PendingCollective(self, None)
        part = self._own(full) if own is None else own
        return self._start(lambda: _all_gather(full, part, group=self.group, async_op=True))

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum ``values`` over ranks, in place. Every rank gets the same bits."""
        if self.group is not None:
            self.timed(lambda: dist.all_reduce(values, group=self.group))
        return values

    def share(self, values: list[float]) -> list[list[float]]:
        """Every rank's ``values`` (fp64, equally many on each), as a list of rows in rank order."""
        if self.group is None:
            return [values]
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = own.new_empty(self.size * len(values))
        self.timed(lambda: _all_gather(rows, own, group=self.group))
        return self.read(rows.view(self.size, -1))

    def sum_of(self, values: list[float]) -> list[float]:
        """Sums of ``values`` (fp64, equally many on each rank) over ranks. Every rank gets the same bits."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max_of(self, values: list[float]) -> list[float]:
        """The maximum over ranks of each of ``values`` (fp64, equally many on each rank)."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def min_of(self, values: Sequence[float]) -> list[float]:
        """The minimum over ranks of each of ``values`` (fp64, equally many on each rank)."""
        return self._reduced(list(values), dist.ReduceOp.MIN)

    def gather_on_first(self, values: list[float]) -> list[list[float]]:
        """As ``share`` on the first rank; the other ranks get an empty list."""
        if self.group is None:
            return [values]
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        table = own.new_empty(self.size, len(values)) if self.rank == 0 else None
        rows = None if table is None else list(table.unbind())
        self.timed(lambda: dist.gather(own, rows, group=self.group, group_dst=0))
        return [] if table is None else self.read(table)

    def _reduced(self, values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.group is None:
            return values
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.timed(lambda: dist.all_reduce(numbers, op=operation, group=self.group))
        return self.read(numbers)

    def read(self, values: Tensor) -> Any:
        """``values``, for which the host waits, as ``tolist``. Raises ``RanksLost`` if this was ended (``ABORTED``)."""
        with self._answered():
            return values.tolist()

    def agree(self, what: str, value: int) -> None:
        """Raise ``RankFailure`` on every rank unless all of them hold the same ``value`` (63 bits)."""
        if self.group is None:
            return
        extremes = torch.tensor([value, -value], dtype=torch.int64, device=self.device)
        self.timed(lambda: dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.group))
        largest, negative = self.read(extremes)
        if largest != -negative:
            raise RankFailure(
                f"ranks disagree on {what} (this one, {self.name} rank {self.rank}, has {value:#x})",
                so="they would wait for each other forever or train on different data",
                fix="check that every node has the same corpus, config and version of bytescale and NumPy",
            )

    def timed(self, collective: Callable[[], object]) -> None:
        """Run or await a collective and count its seconds. Raises ``RankFailure`` when a rank is gone."""
        with self._answered(), self.clock.span():
            collective()

    def _start(self, collective: Callable[[], dist.Work | None]) -> PendingCollective:
        with self._answered():
            return PendingCollective(self, collective())

    def _own(self, full: Tensor) -> Tensor:
        return full.view(self.size, -1)[self.rank]

    def _answered(self) -> AbstractContextManager[None]:
        return answered(f"{self.name} rank {self.rank} lost its group in a collective")


@contextmanager
def _without_split(size: int) -> Iterator[None]:
    """Let PyTorch make a communicator of its own rather than split WORLD's, if only ``size`` of its ranks come here.

    It splits where WORLD was opened with a ``device_id``, which all of WORLD's ranks would have to call.
    """
    world = dist.group.WORLD
    assert world is not None, "there is a group of it"
    bound = world.bound_device_id
    if size < world.size():
        world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


@contextmanager
def answered(what: str) -> Iterator[None]:
    """Raise ``RankFailure``, which begins with ``what``, where a rank is gone or does not answer."""
    try:
        yield
    except RankFailure:
        raise
    except Exception as error:  # numbers that nobody computed may be sizes, or no JSON
        if not (isinstance(error, RuntimeError) or ABORTED.is_set()):
            raise
        raise lost_ranks(what, error) from error
    if ABORTED.is_set():
        raise lost_ranks(what, RuntimeError("a rank is gone"))


def lost_ranks(what: str, error: Exception) -> RanksLost:
    """The error of a rank to which others do not answer any more."""
    return RanksLost(
        f"{what}: {str(error).splitlines()[0]}",
        so="the step cannot be finished, every rank stops",
        fix="look for the first error in the other ranks' output, and for ranks that do not answer, then resume",
    )


def limit_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long ranks of the group wait for one another, as it was made."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit


def gloo_group(store: dist.Store, rank: int, size: int, timeout_seconds: float = 300.0) -> dist.ProcessGroup:
    """One rank's gloo group over a store that all of its ranks share; returned once all of them are connected.

    PyTorch does not know the group by a name. A rank that had nothing to send could otherwise end while another one
    still connects, which gloo calls a crash.
    """
    limit = timedelta(seconds=timeout_seconds)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, limit)
    group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    store.set(f"connected/{rank}", "")
    store.wait([f"connected/{other}" for other in range(size)], limit)
    return group
