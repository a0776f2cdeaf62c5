"""Process groups of simulated accelerators: gloo moves the numbers, and NCCL's rules say when.

A communicator is a stream of its own. Its operation begins when all is done that the current stream was given before,
and ``wait`` holds up the current stream, not the host. NCCL keeps the tensors of an operation until it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from bytescale.parity import thread_ranks
from bytescale.runtime import group as runtime_group
from tests.accelerator.answers import simulated
from tests.accelerator.device import Machine, here, machine
from tests.nccl import recorder
from tests.nccl.recorder import RECEIVE, SEND, End, Log, RecordedWork

Result = TypeVar("Result")


class Work(dist.Work):
    """What a posted operation returns."""

    def __init__(self, own: Communicator, real: Sequence[Any], tensors: list[Tensor]) -> None:
        super().__init__()
        self.own, self.real, self.tensors, self.recorded = own, real, tensors, own.recorded
        self.event = own.stream.record_event()

    def wait(self, timeout: Any = None) -> bool:
        with _disable_current_modes():  # gloo copies, too
            for work in self.real:
                work.wait()
        machine().current.wait_event(self.event)
        if self.recorded is not None:
            self.recorded.wait()
        return True

    def is_completed(self) -> bool:
        raise AssertionError("whether an operation is complete depends on time: the runtime must not decide by it")


class Communicator(dist.ProcessGroup):
    """A gloo group that passes for NCCL's."""

    def __init__(self, real: dist.ProcessGroup, own: Machine) -> None:
        super().__init__(real.rank(), real.size())
        self.real, self.machine = real, own
        self.stream = own.make_stream("NCCL")
        self.recorded: RecordedWork | None = None  # the operation that was posted last
        if own.log is not None:
            self.members = recorder.Communicator(*self._known(own))

    def _known(self, own: Machine) -> tuple[str, tuple[int, ...]]:
        """A name that all members have for it, and their world ranks."""
        with own.aside(), _disable_current_modes():
            told = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size())]
            self.real.allgather([told], [torch.tensor([own.device.index])]).wait()
        ranks = tuple(int(rank) for rank in told)
        own.groups[ranks] += 1
        return f"group {own.groups[ranks]} of {ranks}", ranks

    def end(self, kind: str, tensor: Tensor, peer: int) -> End:
        return End(kind, self.members.ranks[peer], tensor.numel() * tensor.element_size())

    def record(self, ends: Sequence[tuple[str, Tensor, int]], what: str, tensors: Sequence[Tensor]) -> None:
        """Tell the log what is posted. Ranks send one another rows of different numbers (all-to-all)."""
        if self.machine.log is None:
            return
        size = "" if (what.startswith("all") and "to" in what) or not tensors else f" of {tensors[0].numel()}"
        collective = "" if ends else f"{what}{size} {tensors[0].dtype if tensors else ''}"
        self.recorded = self.machine.log.post(self.members, [self.end(*own) for own in ends], collective)

    def _get_backend(self, device: torch.device) -> Any:
        """Which knows the time limit."""
        return self.real._get_backend(torch.device("cpu"))

    def get_group_store(self) -> Any:
        return self.real.get_group_store()

    def post(
        self,
        reads: Any,
        writes: Any,
        what: str,
        start: Callable[[], Sequence[Any]],
        ends: Sequence[tuple[str, Tensor, int]] = (),
    ) -> Work:
        """Post one operation. ``start`` begins the real one. ``ends``: of messages, kind, tensor and peer of each."""
        own, given = self.machine, ([], [])  # type: tuple[Machine, tuple[list[Tensor], list[Tensor]]]
        for part, tensors in zip(given, (reads, writes), strict=True):
            part += [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
        for tensor in {id(tensor): tensor for tensor in [*given[0], *given[1]]}.values():
            if own.place(tensor) != "device":
                own.fault("mix", f"{what}: NCCL was given a tensor in host memory")
            if not tensor.is_contiguous():
                own.fault("mix", f"{what}: NCCL was given a tensor with gaps")
        self.stream.wait_stream(own.current)
        own.run(self.stream, given[0], given[1], what, kept=True)
        self.record(ends, what, given[0] or given[1])
        with _disable_current_modes():
            return Work(self, start(), [*given[0], *given[1]])

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        ends = [(SEND, tensors[0], peer)]
        return self.post(tensors, [], "send", lambda: [self.real.send(tensors, peer, tag)], ends)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        ends = [(RECEIVE, tensors[0], peer)]
        return self.post([], tensors, "receive", lambda: [self.real.recv(tensors, peer, tag)], ends)

    def barrier(self, opts: Any = None) -> Work:
        return self.post([], [], "barrier", lambda: [self.real.barrier()])


def _collective(name: str, in_place: bool) -> Callable[..., Work]:
    def call(self: Communicator, to: Any, *rest: Any) -> Work:
        reads = to if in_place else rest[0]
        given: tuple[Any, ...] = (to, *rest)
        if name in ("_allgather_base", "all_gather_single"):  # of which NCCL asks for the numbers alone, and gloo more
            given = (to.view(-1), rest[0].view(-1), *rest[1:])
        return self.post(reads, to, name, lambda: [getattr(self.real, name)(*given)])

    return call


for _name in ("allreduce", "broadcast", "reduce"):
    setattr(Communicator, _name, _collective(_name, in_place=True))
for _name in (
    *("allgather", "_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single"),
    *("alltoall_base", "all_to_all_single", "gather", "scatter", "alltoall", "reduce_scatter"),
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(Communicator, _name, _collective(_name, in_place=False))


def batching() -> SimpleNamespace:
    """Stands in for ``torch.distributed`` where messages are posted: a batch is one operation."""

    def batch_isend_irecv(operations: list[tuple[str, Tensor, Communicator, int]]) -> list[Work]:
        (group,) = {operation[2] for operation in operations}
        parts = {kind: [tensor for own, tensor, *_ in operations if own == kind] for kind in ("send", "recv")}

        def start() -> list[Any]:
            return [getattr(group.real, kind)([tensor], peer, 0) for kind, tensor, _, peer in operations]

        ends = [(SEND if kind == "send" else RECEIVE, tensor, peer) for kind, tensor, _, peer in operations]
        return [group.post(parts["send"], parts["recv"], "messages", start, ends)]

    def operation(kind: str, tensor: Tensor, group: Communicator, group_peer: int) -> tuple[Any, ...]:
        return kind, tensor, group, group_peer

    return SimpleNamespace(
        P2POp=operation, batch_isend_irecv=batch_isend_irecv, isend="send", irecv="recv", Work=dist.Work
    )


@contextmanager
def simulated_groups() -> Any:
    """``simulated``, and every group that the runtime makes is a communicator."""
    make = runtime_group.gloo_group

    def made(*arguments: Any) -> Any:
        own = make(*arguments)
        return own if (host := here()) is None else Communicator(own, host)

    with (
        simulated(),
        mock.patch.object(runtime_group, "gloo_group", made),
        mock.patch("bytescale.attention.rings.exchange.dist", batching()),
    ):
        yield


def run_machines(
    num_ranks: int,
    work: Callable[[Machine, Communicator], Result],
    *,
    timeout_seconds: float = 600.0,
    logged: bool = False,
) -> tuple[list[Result], list[Machine]]:
    """Run ``work`` once per rank, each on a machine of its own; its results and the machines, in rank order.

    ``logged``: whether each writes down what its host posts (``Machine.log``).
    """
    machines = [Machine(rank, Log(rank) if logged else None) for rank in range(num_ranks)]

    def one_rank(real: dist.ProcessGroup) -> Result:
        with machines[real.rank()].running() as own:
            return work(own, Communicator(real, own))

    with simulated_groups():
        results = thread_ranks.run_ranks(num_ranks, one_rank, timeout_seconds=timeout_seconds)
    return results, machines
