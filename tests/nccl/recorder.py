"""Records what the real executor posts on every rank of a mesh, in one process and without sending messages.

Each rank runs its whole step alone: it agrees, runs its micro-batches with a kernel that returns zeros, reduces and
updates, against process groups that write down what they are asked and return at once. ``tests.nccl.replay`` then lets
all ranks' records meet under NCCL's rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bytescale.attention import AttentionRules
from bytescale.attention.blocks import BlockSet
from bytescale.attention.kernels import OfQueries, lse_dtype
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.pipeline import Action, StageLinks, run_stage

SEND, RECEIVE = "send", "receive"


@dataclass(frozen=True)
class Communicator:
    """A process group, by its name and its world ranks in order."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class End:
    """One side of a message: whether this rank sends or receives it, the other side's world rank, and its bytes."""

    kind: str
    peer: int
    num_bytes: int


@dataclass(frozen=True)
class Compute:
    """The rank's host launches kernels or allocates memory; neighbouring ones are one event."""

    during: str


@dataclass(frozen=True)
class Post:
    """The host gives a communicator one operation: a batch of messages, or a collective."""

    number: int
    communicator: Communicator
    ends: tuple[End, ...]
    collective: str
    during: str


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for the operation of this number; the host does not."""

    number: int
    during: str


@dataclass(frozen=True)
class Drain:
    """The host waits for its compute stream."""

    during: str


@dataclass(frozen=True)
class Look:
    """The host looks whether operations of its rank were aborted (``group.ABORTED``)."""

    during: str


@dataclass(frozen=True)
class Kept:
    """The host has copied its states behind an update, which counts as complete from here on."""

    update: int
    during: str


Event = Compute | Post | Wait | Drain | Look | Kept


@dataclass
class Log:
    """What one rank's host does, in order."""

    rank: int
    events: list[Event] = field(default_factory=list)
    during: str = "before the first micro-batch"
    num_posts: int = 0

    def compute(self) -> None:
        if not (self.events and isinstance(self.events[-1], Compute)):
            self.events.append(Compute(self.during))

    def look(self) -> bool:
        """Stands in for ``group.ABORTED.is_set``."""
        self.events.append(Look(self.during))
        return False

    def drain(self) -> None:
        self.events.append(Drain(self.during))

    def kept(self, update: int) -> None:
        self.events.append(Kept(update, self.during))

    def post(self, communicator: Communicator, ends: Sequence[End] = (), collective: str = "") -> RecordedWork:
        self.events.append(Post(self.num_posts, communicator, tuple(ends), collective, self.during))
        self.num_posts += 1
        return RecordedWork(self, self.num_posts - 1)


class RecordedWork(dist.Work):
    """What a posted operation returns."""

    def __init__(self, log: Log, number: int) -> None:
        super().__init__()
        self.log = log
        self.number = number

    def wait(self, timeout: Any = None) -> bool:
        self.log.events.append(Wait(self.number, self.log.during))
        return True

    def is_completed(self) -> bool:
        raise AssertionError("whether an operation is complete depends on time: the runtime must not decide by it")


class RecordedGroup(dist.ProcessGroup):
    """A process group that writes down what it is asked; sums and gathers give every rank its own values."""

    def __init__(self, log: Log, name: str, ranks: Sequence[int]) -> None:
        super().__init__(list(ranks).index(log.rank), len(ranks))
        self.log = log
        self.communicator = Communicator(name, tuple(ranks))
        self.subject = ""  # what the next collectives are of, where their places do not tell

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> RecordedWork:
        return self._collective("all-reduce", tensors[0])

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> RecordedWork:
        return self._collective("broadcast", tensors[0])

    def _allgather_base(self, full: Tensor, part: Tensor, options: Any = None) -> RecordedWork:
        full.view(self.size(), -1).copy_(part.clone().view(1, -1))
        return self._collective("all-gather", part, full)

    def _reduce_scatter_base(self, part: Tensor, full: Tensor, options: Any = None) -> RecordedWork:
        part.zero_()
        return self._collective("reduce-scatter", part, full)

    def alltoall_base(self, received: Tensor, sent: Tensor, out: Any, into: Any, options: Any = None) -> RecordedWork:
        """Every rank sends what this one keeps, where all get equally many: numbers of rows. Rows are zero."""
        if len(set(out)) == len(set(into)) == 1 and out == into and sent.dtype == torch.int64:
            received.copy_(sent)
        else:
            received.zero_()
        kind = f"all-to-all of rows of {sent[:1].numel() or received[:1].numel()} {sent.dtype}"
        return self.log.post(self.communicator, collective=kind)

    all_to_all_single = alltoall_base
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names since torch 2.13

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> RecordedWork:
        return self.batch([self.end(SEND, tensors[0], peer)])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> RecordedWork:
        return self.batch([self.end(RECEIVE, tensors[0], peer)])

    def end(self, kind: str, tensor: Tensor, peer: int) -> End:
        return End(kind, self.communicator.ranks[peer], tensor.numel() * tensor.element_size())

    def batch(self, ends: Sequence[End]) -> RecordedWork:
        return self.log.post(self.communicator, ends)

    def _collective(self, kind: str, tensor: Tensor, full: Tensor | None = None) -> RecordedWork:
        """``full``: what the ranks have together. Its place in its buffer tells buckets of one size apart."""
        place = (tensor if full is None else full).storage_offset()
        return self.log.post(
            self.communicator, collective=f"{kind} of {tensor.numel()} {tensor.dtype} at {place}{self.subject}"
        )


class ZeroKernel:
    """Attention that costs nothing and says zero."""

    def with_rules(self, rules: AttentionRules) -> ZeroKernel:
        return self

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockSet, scale: float) -> tuple[Tensor, Tensor]:
        rows = blocks.num_query_rows
        return q.new_zeros(rows, q.shape[1], v.shape[2]), q.new_zeros(rows, q.shape[1], dtype=lse_dtype(q.dtype))

    def backward(
        self, queries: OfQueries, k: Tensor, v: Tensor, blocks: BlockSet, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, keys = queries.q, blocks.num_key_rows
        return (
            q.new_zeros(blocks.num_query_rows, *q.shape[1:]),
            k.new_zeros(keys, *k.shape[1:]),
            v.new_zeros(keys, *v.shape[1:]),
        )


class _Launches(TorchDispatchMode):
    """Every operator launches a kernel or allocates: a point where CUDA may wait for the whole device."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.log.compute()
        return func(*args, **(kwargs or {}))


def record(shape: MeshShape, step: Callable[[Mesh], object], **options: Any) -> list[list[Event]]:
    """What every rank's host does in ``step(mesh)``, in the order of world ranks.

    The meshes' exchanges are batched, as on CUDA. ``options``: of ``Mesh.of``.
    """
    return [_record_rank(rank, shape, step, options) for rank in range(shape.size)]


def _record_rank(rank: int, shape: MeshShape, step: Callable[[Mesh], object], options: dict[str, Any]) -> list[Event]:
    log = Log(rank)

    def make_group(name: str, ranks: Sequence[int]) -> RecordedGroup:
        return RecordedGroup(log, name, ranks)

    world = RankGroup(make_group("world", range(shape.size)))
    mesh = Mesh.of(world, shape, make_group, **options)
    for group in [mesh.world, *mesh.ring_groups(), mesh.tp, *mesh.forward, *mesh.backward]:
        if group.group is not None:
            group.exchange = group.make_exchange(batched=True)

    def labelled(links: StageLinks, forward: Any, around: Any, behind_backward: Any) -> None:
        @contextmanager
        def noted(action: Action) -> Iterator[None]:
            direction = "backward" if action[0] else "forward"
            log.during = f"{direction} of micro-batch {action[1]} on stage {mesh.stage}"
            try:
                with around(action):
                    yield
            finally:
                log.during = f"after the {log.during}"

        run_stage(links, forward, noted, behind_backward)

    with (
        patch("bytescale.runtime.executor.run_stage", labelled),
        patch("bytescale.attention.rings.exchange.dist", batching()),
        _Launches(log),
    ):
        step(mesh)
    return log.events


def batching() -> SimpleNamespace:
    """Stands in for ``torch.distributed`` where messages are posted: a batch is one operation."""

    def batch_isend_irecv(operations: list[tuple[str, Tensor, RecordedGroup, int]]) -> list[RecordedWork]:
        (group,) = {operation[2] for operation in operations}
        return [group.batch([group.end(kind, tensor, peer) for kind, tensor, _, peer in operations])]

    def operation(kind: str, tensor: Tensor, group: RecordedGroup, group_peer: int) -> tuple:
        assert tensor.is_contiguous(), "NCCL takes contiguous tensors alone"
        return kind, tensor, group, group_peer

    return SimpleNamespace(
        P2POp=operation, batch_isend_irecv=batch_isend_irecv, isend=SEND, irecv=RECEIVE, Work=dist.Work
    )
