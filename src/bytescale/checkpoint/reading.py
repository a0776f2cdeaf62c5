"""Reads parts of tensors from a checkpoint of format 3: only the blocks that they lie in, and each of them checked."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from bytescale.checkpoint.layout import Box, Layout, LayoutEntry
from bytescale.checkpoint.manifest import Manifest, damaged, file_name
from bytescale.checkpoint.tensor_file import TensorFile, element_range, piece_name
from bytescale.checkpoint.tensor_writing import DTYPES, bytes_of
from bytescale.common.errors import CheckpointError, problem
from bytescale.storage.place import Place, is_url

_OPEN_FILES = 64
"""Headers that are kept in memory."""
_JOINED_BYTES = 32 * 2**20
"""Reads of neighbouring ranges behind a URL are joined up to so many bytes. On a disk there is nothing to gain."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A rectangle of a parameter's state, and the tensor of its sizes that takes it."""

    state: str
    parameter: str
    box: Box
    target: Tensor


@dataclass(frozen=True, slots=True)
class _Request:
    """A part of one stored rectangle (``piece``), and the view that takes it."""

    piece: str
    stored: Box
    shared: Box
    target: Tensor


class CheckpointReader:
    """Reads tensors of one checkpoint. Raises ``CheckpointError`` for what is not there or is damaged."""

    def __init__(self, folder: Place, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._holders: dict[str, list[tuple[Layout, LayoutEntry]]] = defaultdict(list)
        for layout in manifest.layouts:
            for entry in layout.entries:
                if entry.written:
                    self._holders[entry.name].append((layout, entry))
        self._open = lru_cache(_OPEN_FILES)(self._open_file)

    def shape_of(self, parameter: str) -> tuple[int, ...]:
        """Shape of a whole parameter."""
        return self._holders_of(parameter)[0][1].shape

    def whole(self, state: str, parameter: str) -> Tensor:
        """All of a parameter's state, in the dtype in which it is stored."""
        shape = self.shape_of(parameter)
        if 2 * math.prod(shape) > self.manifest.num_bytes():
            raise damaged(self.folder, "run_state.json", f"{parameter} is larger than all files together")
        box = (tuple(0 for _ in shape), shape)
        number, stored, _ = next(iter(self._sources(parameter, box)))
        target = torch.empty(shape, dtype=DTYPES[self._open(number).dtype_of(piece_name(state, parameter, stored))])
        self.fill([Wanted(state, parameter, box, target)])
        return target

    def fill(self, wanted: Sequence[Wanted]) -> None:
        """Fill every target. Files are read one after the other, each from its start to its end."""
        requests: dict[int, list[_Request]] = defaultdict(list)
        for one in wanted:
            if one.state not in self.manifest.states:
                raise self._lacks(f"{one.state}.{one.parameter}")
            found = 0
            for number, stored, shared in self._sources(one.parameter, one.box):
                inside = tuple(
                    slice(a - b, a - b + n) for a, b, n in zip(shared[0], one.box[0], shared[1], strict=True)
                )
                name = piece_name(one.state, one.parameter, stored)
                requests[number].append(_Request(name, stored, shared, one.target[inside]))
                found += math.prod(shared[1])
            if found != math.prod(one.box[1]):
                raise self._lacks(f"a part of {one.state}.{one.parameter}")
        for number in sorted(requests):
            self._serve(self._open(number), requests[number])

    def _serve(self, file: TensorFile, requests: list[_Request]) -> None:
        for request in requests:
            file.check_shape(request.piece, request.stored[1])
        ranges = {id(request): _bytes_in_file(file, request) for request in requests}
        requests.sort(key=lambda request: ranges[id(request)])
        for span in _spans(requests, ranges, _JOINED_BYTES if is_url(self.folder) else 0):
            low, high = ranges[id(span[0])][0], max(ranges[id(request)][1] for request in span)
            if len(span) == 1 and _takes_bytes(file, span[0]):
                file.read(span[0].piece, 0, bytes_of(span[0].target))
                continue
            content = memoryview(bytearray(high - low))
            if len(span) > 1:
                file.read_raw(low, content)
            for request in span:
                start, stop = ranges[id(request)]
                own = content[start - low : stop - low]
                offset = start - file.place_of(request.piece)[0]
                if len(span) > 1:
                    file.check(request.piece, offset, own)
                else:
                    file.read(request.piece, offset, own)
                _take(file, request, offset, own)

    def _sources(self, parameter: str, box: Box) -> Iterator[tuple[int, Box, Box]]:
        for layout, entry in self._holders_of(parameter):
            yield from layout.overlapping(entry, box)

    def _holders_of(self, parameter: str) -> list[tuple[Layout, LayoutEntry]]:
        if parameter not in self._holders:
            raise self._lacks(parameter)
        return self._holders[parameter]

    def _open_file(self, number: int) -> TensorFile:
        return TensorFile(self.folder, file_name(number), self.manifest.files[number])

    def _lacks(self, what: str) -> CheckpointError:
        return CheckpointError(
            problem(f"the checkpoint {self.folder} has no {what}", fix="name a complete checkpoint of this model")
        )


def _bytes_in_file(file: TensorFile, request: _Request) -> tuple[int, int]:
    """The blocks that a request needs, as bytes of the file."""
    start, stop = file.byte_range(request.piece, *element_range(request.shared, request.stored))
    offset = file.place_of(request.piece)[0]
    return offset + start, offset + stop


def _spans(requests: list[_Request], ranges: dict[int, tuple[int, int]], most_bytes: int) -> Iterator[list[_Request]]:
    """Neighbours without a gap, joined up to ``most_bytes``: one question to a store instead of many."""
    span: list[_Request] = []
    for request in requests:
        low, high = ranges[id(request)]
        if span and (low > ranges[id(span[-1])][1] or high - ranges[id(span[0])][0] > most_bytes):
            yield span
            span = []
        span.append(request)
    if span:
        yield span


def _takes_bytes(file: TensorFile, request: _Request) -> bool:
    """Whether the file's bytes can be read straight into the target's memory."""
    target = request.target
    is_plain = target.device.type == "cpu" and target.is_contiguous()
    return is_plain and request.shared == request.stored and target.dtype == DTYPES[file.dtype_of(request.piece)]


def _take(file: TensorFile, request: _Request, offset: int, content: memoryview) -> None:
    """Copy a request's part out of ``content``, the piece's bytes from ``offset`` on."""
    dtype = DTYPES[file.dtype_of(request.piece)]
    elements = torch.frombuffer(content, dtype=dtype)
    request.target.copy_(_strided(elements, offset // dtype.itemsize, request.shared, request.stored))


def _strided(elements: Tensor, first: int, inner: Box, outer: Box) -> Tensor:
    """``inner`` as a view of ``elements``, which are those of ``outer`` from number ``first`` on."""
    strides = [math.prod(outer[1][dim + 1 :]) for dim in range(len(outer[1]))]
    return elements.as_strided(inner[1], strides, elements.storage_offset() + element_range(inner, outer)[0] - first)
