"""One rank's simulated accelerator, on which CPU tensors pass for tensors of a GPU.

Numbers are computed at once, on the CPU, so results can be compared with any other run. What a GPU would do later, and
perhaps in another order, is followed by vector clocks. ``answers`` changes what Python is told by tensors.
``_Operators`` sees what PyTorch computes, forward and backward, and says which bytes the current stream reads and
writes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.accelerator import operators
from tests.accelerator.clocks import Clock, Stream, Timeline, join
from tests.accelerator.faults import Fault, HostWait, place_in_code
from tests.accelerator.memory import Access, Allocator, Extent, Memory, Place
from tests.nccl.recorder import Log

_threads = threading.local()


class Machine:
    """The host of one rank and its GPU. ``faults`` and ``waits`` are what a test asks for in the end."""

    def __init__(self, index: int = 0, log: Log | None = None) -> None:
        """``log``: takes what the host posts, for ``tests.nccl.replay``."""
        self.log, self.groups = log, Counter[tuple[int, ...]]()
        self.device = torch.device("cuda", index)
        self.host = Timeline(0, "host")
        self.timelines: list[Timeline] = [self.host]
        self.allocator = Allocator()
        self.faults: list[Fault] = []
        self.waits: list[HostWait] = []
        self.during = ""
        self.num_micro_batches = 0  # that ``loops.micro_batches_are_parts`` has seen
        self.making: list[Place] = []  # of the factory functions that run
        self.compute = self.make_stream("compute")
        self.current = self.compute

    def make_stream(self, name: str = "") -> Stream:
        stream = Stream(self, len(self.timelines), name or f"stream {len(self.timelines)}")
        self.timelines.append(stream)
        return stream

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Host waits inside of the block belong to this part of a step."""
        before, self.during = self.during, name
        try:
            yield
        finally:
            self.during = before

    @contextmanager
    def running(self) -> Iterator[Machine]:
        """This thread is the rank's host."""
        before, _threads.machine = getattr(_threads, "machine", None), self
        try:
            with _Operators(self):
                yield self
        finally:
            _threads.machine = before

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside of the block tensors are what they are: on the CPU."""
        _threads.machine = None
        try:
            yield
        finally:
            _threads.machine = self

    def place(self, tensor: Tensor) -> Place:
        memory = self.allocator.find(tensor._values if isinstance(tensor, NestedTensor) else tensor)
        return "host" if memory is None else memory.place

    def places_of(self, tensors: list[Tensor]) -> list[Place]:
        """Where an operator's inputs are. What may be anywhere is on the device from now on if another one is."""
        places = [self.place(tensor) for tensor in tensors]
        if "device" in places and "anywhere" in places:
            for tensor in tensors:
                memory = self.allocator.find(tensor)
                if memory is not None and memory.place == "anywhere":
                    memory.place = "device"
            places = ["device" if place == "anywhere" else place for place in places]
        return places

    def host_waits(self, what: str, clock: Clock | None = None) -> None:
        """The host waits for what ``clock`` knows; None: for all that was launched on the current stream."""
        self.waits.append(HostWait(what, place_in_code(), self.during))
        join(self.host.clock, self.current.clock if clock is None else clock)

    def add(self, tensor: Tensor, place: Place) -> None:
        """Allocate what has just been made; on the device, by the current stream's allocator."""
        if place != "host" and self.allocator.find(tensor) is None:
            for access in self.allocator.add(tensor, place, self.current):
                self.fault("early free", f"{self.named(access)} still uses memory that may be allocated again")

    def run(self, timeline: Stream, reads: list[Tensor], writes: list[Tensor], what: str, kept: bool = False) -> None:
        """An operation of a stream; what lies in ordinary host memory is not followed."""
        moment, where = timeline.launch(), ""
        for tensor, is_written in [*((own, False) for own in reads), *((own, True) for own in writes)]:
            memory = self.allocator.find(tensor)
            if memory is None or tensor.numel() == 0:
                continue
            where = where or f"{what} ({place_in_code()})"
            self._access(timeline, memory, Access(moment, is_written, Extent.of(tensor), where, kept))

    def run_on_host(self, reads: list[Tensor], writes: list[Tensor], what: str) -> None:
        """The host itself reads and writes pinned memory."""
        pinned = [
            (memory, tensor, is_written)
            for part, is_written in ((reads, False), (writes, True))
            for tensor in part
            if (memory := self.allocator.find(tensor)) is not None and tensor.numel()
        ]
        if pinned:
            moment, where = self.host.advance(), f"{what} ({place_in_code()})"
            for memory, tensor, is_written in pinned:
                self._access(self.host, memory, Access(moment, is_written, Extent.of(tensor), where, False))

    def fault(self, kind: Any, what: str) -> None:
        self.faults.append(Fault(kind, what, place_in_code()))

    def named(self, access: Access) -> str:
        return f"{access.what} on {self.timelines[access.moment.timeline].name}"

    def copy(self, to: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        """A copy between host and device has just been made."""
        host = source if self.place(to) == "device" else to
        if self.place(host) == "host" and non_blocking and not (host is source and host.dim() == 0):
            self.fault("mix", "an asynchronous copy from or to memory that is not page-locked")
        self.run(self.current, [source], [to], "copy")
        if not non_blocking:
            self.host_waits("a copy between host and device")

    def _access(self, timeline: Timeline, memory: Memory, access: Access) -> None:
        earlier = memory.access(timeline, access)
        if earlier is not None:
            kinds = ["writes" if own.writes else "reads" for own in (access, earlier)]
            self.fault(
                "race", f"{self.named(access)} {kinds[0]} what {self.named(earlier)} {kinds[1]}, in no certain order"
            )


def here() -> Machine | None:
    """The machine whose host this thread is."""
    return getattr(_threads, "machine", None)


def machine() -> Machine:
    """As ``here``, where there is one."""
    own = here()
    assert own is not None, "the thread is the host of a simulated accelerator"
    return own


class _Operators(TorchDispatchMode):
    """Follows every operator that is computed."""

    def __init__(self, own: Machine) -> None:
        super().__init__()
        self.machine = own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, own = kwargs or {}, self.machine
        if any(issubclass(kind, NestedTensor) for kind in types):
            return NotImplemented  # it calls operators of its values and its offsets, which come here
        if func.namespace == "c10d":
            return func(*args, **kwargs)  # ``groups.Communicator`` has told of it
        if own.log is not None:
            own.log.compute()
        given = list(operators.arguments(func, args, kwargs))
        places = own.places_of([tensor for tensor, _ in given])
        wide = {place for (tensor, _), place in zip(given, places, strict=True) if tensor.dim() or place == "device"}
        on_device = "device" in places
        name = func._schema.name.partition("::")[2]
        if name == "copy_" and on_device and places[0] != places[1] and "device" in places[:2]:
            result = func(*args, **kwargs)
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            own.copy(
                given[0][0], given[1][0], non_blocking=non_blocking or (places[1] == "host" and given[1][0].dim() == 0)
            )
            return result
        if on_device:
            self._may_wait(func, name, args, kwargs, wide)
        if func in operators.EMULATED:
            with own.aside():
                result = operators.EMULATED[func](*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        self._account(func, name, given, result, places)
        return result

    def _may_wait(self, func: Any, name: str, args: Any, kwargs: Any, wide: set[Place]) -> None:
        own = self.machine
        if reason := operators.host_waits(func, args, kwargs):
            own.host_waits(reason)
        if len(wide) > 1:
            if name in ("index", "index_put", "index_put_", "_index_put_impl_") and own.place(args[0]) == "device":
                own.host_waits(f"{name} with an index in host memory")
            else:
                own.fault("mix", f"{name} of tensors of the host and of the device")

    def _account(
        self, func: Any, name: str, given: list[tuple[Tensor, bool]], result: Any, places: list[Place]
    ) -> None:
        own = self.machine
        looks = operators.looks_inside(func)
        reads = [tensor for tensor, _ in given] if looks else []
        writes = [tensor for tensor, is_written in given if is_written]
        inputs = {tensor.untyped_storage()._cdata for tensor, _ in given}
        on_device = "device" in places
        # What PyTorch's own code makes out of nothing belongs to whatever it meets first.
        place: Place = "device" if on_device else "anywhere" if set(places) <= {"anywhere"} else "host"
        place = own.making[-1] if own.making else place
        for made in tree_leaves(result):
            is_new = isinstance(made, Tensor) and not made.is_meta and made.untyped_storage()._cdata not in inputs
            if is_new and place != "host":
                own.add(made, place)
                writes += [] if "empty" in name else [made]
        if on_device or place == "device":
            own.run(own.current, reads, writes, name)
        elif looks:
            own.run_on_host(reads, writes, name)
