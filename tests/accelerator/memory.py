"""Memory of a simulated accelerator: where a storage lies, and which bytes of it were read and written when."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.accelerator.clocks import Moment, Stream, Timeline

Place = Literal["host", "pinned", "device", "anywhere"]
"""Host memory of the ordinary kind, which may be paged out, page-locked host memory, and that of the device.

``anywhere``: made by code in C++, which nobody was told the device of."""


class Extent(NamedTuple):
    """Bytes of a storage: from the first to behind the last one, and the elements in between."""

    start: int
    stop: int
    element_size: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    is_dense: bool

    @staticmethod
    def of(tensor: Tensor) -> Extent:
        size = tensor.element_size()
        shape = tuple(tensor.shape)
        strides = tuple(stride * size for stride in tensor.stride())
        start = int(tensor.storage_offset()) * size
        span = size + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
        return Extent(start, start + span, size, shape, strides, span <= tensor.numel() * size)

    def overlaps(self, other: Extent) -> bool:
        """Whether they have a byte in common."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        if start >= stop:
            return False
        if self.is_dense and other.is_dense:
            return True
        return bool((self._mask(start, stop) & other._mask(start, stop)).any())

    def _mask(self, start: int, stop: int) -> np.ndarray:
        """For every byte from ``start`` to ``stop``: whether it is one of these."""
        whole = np.zeros(self.stop - self.start, dtype=bool)
        bytes_of = np.lib.stride_tricks.as_strided(whole, (*self.shape, self.element_size), (*self.strides, 1))
        bytes_of[...] = True
        return whole[start - self.start : stop - self.start]


class Access(NamedTuple):
    """An operation that reads or writes bytes. ``is_kept``: the memory stays until it is over, as NCCL sees to."""

    moment: Moment
    writes: bool
    extent: Extent
    what: str
    is_kept: bool


class Memory:
    """One storage in pinned memory or on the device."""

    def __init__(self, storage: torch.UntypedStorage, place: Place, stream: Stream, freed: deque[Memory]) -> None:
        """``stream``: on which it was allocated, so that whatever is allocated there next may get the same bytes."""
        self.place, self.stream = place, stream
        self.num_bytes = storage.nbytes()
        self.recorded: set[int] = set()  # streams for whose work the allocator waits (``record_stream``)
        self._accesses: dict[tuple[int, bool, Extent], Access] = {}
        self.storage = weakref.ref(storage, lambda _: freed.append(self))

    def begin(self) -> None:
        """Whatever the stream was given so far may still use these bytes, which it may have had for something else."""
        moment = Moment(self.stream.number, self.stream.clock[self.stream.number])
        whole = Extent(0, self.num_bytes, 1, (self.num_bytes,), (1,), True)
        self._accesses[moment.timeline, True, whole] = Access(moment, True, whole, "what had the memory before", False)

    def access(self, timeline: Timeline, access: Access) -> Access | None:
        """Add an access. Returns an earlier one that conflicts with it, if their order is not certain."""
        conflict = None
        for earlier in self._accesses.values():
            if not (earlier.writes or access.writes) or timeline.knows(earlier.moment):
                continue
            if earlier.moment != access.moment and earlier.extent.overlaps(access.extent):
                conflict = earlier
                break
        extent = access.extent
        if access.writes and extent.is_dense and extent.stop - extent.start >= self.num_bytes and conflict is None:
            # Whatever comes after this one comes after those, too.
            self._accesses = {key: own for key, own in self._accesses.items() if own.moment == access.moment}
        self._accesses[access.moment.timeline, access.writes, extent] = access
        return conflict

    def left(self) -> Unfinished:
        """What may still use the memory when it is given back. Empties it."""
        others = (
            access
            for access in self._accesses.values()
            if not access.is_kept
            and access.moment.timeline != self.stream.number
            and access.moment.timeline not in self.recorded
        )
        left = Unfinished(self.stream, list(others))
        self._accesses = {}
        return left


@dataclass(frozen=True)
class Unfinished:
    """Accesses by other streams to memory that its stream may give to somebody else."""

    stream: Stream
    accesses: list[Access]

    def first(self) -> Access | None:
        """One that the stream does not know to be over."""
        return next((access for access in self.accesses if not self.stream.knows(access.moment)), None)


class Allocator:
    """All pinned and device memory of a rank. A storage that it does not know lies in ordinary host memory."""

    def __init__(self) -> None:
        self._known: dict[int, Memory] = {}
        self._gone: deque[Memory] = deque()
        self._free: list[Unfinished] = []

    def find(self, tensor: Tensor) -> Memory | None:
        memory = self._known.get(tensor.untyped_storage()._cdata)
        return memory if memory is not None and memory.storage() is not None else None

    def add(self, tensor: Tensor, place: Place, stream: Stream) -> Iterable[Access]:
        """Allocate. Returns an access for every piece of memory which this may be while it is still used elsewhere."""
        while self._gone:
            memory = self._gone.popleft()
            if memory.place == "device":  # pinned memory waits for its copies by itself
                self.give_back(memory)
        early: list[Access] = []
        if place == "device":
            for unfinished in [own for own in self._free if own.stream is stream]:
                first = unfinished.first()
                early += [] if first is None else [first]
                self._free.remove(unfinished)
        storage = tensor.untyped_storage()
        memory = self._known[storage._cdata] = Memory(storage, place, stream, self._gone)
        if place == "device":
            memory.begin()
        return early

    def give_back(self, memory: Memory) -> None:
        left = memory.left()
        if left.accesses:
            self._free.append(left)
