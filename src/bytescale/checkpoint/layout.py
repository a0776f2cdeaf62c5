"""Which rectangles of the model's tensors each rank writes: a function of the mesh and the flat buffers' layout alone.

The ranks of an HDP group hold the same parameters in flat buffers, and each owns a part of every bucket of them
(``runtime.optimizer.flat``). A range of a flat buffer is a few rectangles of each parameter that it touches, because
tensors are stored row by row::

    parameter [4, 5], elements 3 to 17 of it:      . . . A A
                                                   B B B B B
                                                   B B B B B
                                                   C C . . .     three rectangles: A, B and C

Rectangles of more than ``PIECE_ELEMENTS`` elements are cut further, so that a reader of a part need not read much more.
From each buffer's ``Layout``, a reader on any other mesh computes which file has which part of a tensor. No torch here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

PIECE_ELEMENTS = 2**24
"""64 MiB of fp32: what a reader of a few numbers reads at most, because a piece is checked as a whole."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangle in a tensor."""


class LayoutEntry(NamedTuple):
    """One parameter, or the part of it that an HDP group holds, in the group's flat buffer."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    offsets: tuple[int, ...]
    """Where the group's part begins in the whole parameter."""
    sizes: tuple[int, ...]
    """Shape of the group's part."""
    start: int
    """Where the part begins in the flat buffer, in elements."""
    written: bool
    """Whether this group writes the part. Of several groups that hold the same part, one does."""

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.sizes)


class LayoutPiece(NamedTuple):
    """A rectangle of a parameter that one rank holds as elements ``start`` to ``stop - 1`` of the flat buffer."""

    entry: LayoutEntry
    box: Box
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """A flat buffer of one HDP group."""

    entries: tuple[LayoutEntry, ...]  # the parameters in the buffer's order
    bounds: tuple[int, ...]  # where buckets begin, and where the last one ends, in elements
    files: tuple[int, ...]  # every bucket is divided evenly among these, in this order
    most_elements: int = PIECE_ELEMENTS  # of one stored rectangle

    def pieces(self, file: int) -> Iterator[LayoutPiece]:
        """The rectangles that a file's rank holds, in the buffer's order."""
        part = self.files.index(file)
        for begin, end in pairwise(self.bounds):
            size = (end - begin) // len(self.files)
            low = begin + part * size
            for entry in self.entries[max(0, bisect_right(self._starts, low) - 1) :]:
                if entry.start >= low + size:
                    break
                yield from self._pieces_of(entry, max(low, entry.start), min(low + size, entry.stop))

    def overlapping(self, entry: LayoutEntry, wanted: Box) -> Iterator[tuple[int, Box, Box]]:
        """Yield each stored rectangle that shares elements with ``wanted``: its file, itself, and what it shares."""
        shared = intersection(wanted, (entry.offsets, entry.sizes))
        if shared is None:
            return
        first = tuple(a - b for a, b in zip(shared[0], entry.offsets, strict=True))
        last = tuple(a + n - 1 for a, n in zip(first, shared[1], strict=True))
        low, high = entry.start + flat_index(first, entry.sizes), entry.start + flat_index(last, entry.sizes) + 1
        for begin, end in pairwise(self.bounds[bisect_right(self.bounds, low) - 1 :]):
            if begin >= high:
                return
            size = (end - begin) // len(self.files)
            first_part = max(0, low - begin) // size
            for start, file in zip(range(begin + first_part * size, high, size), self.files[first_part:], strict=False):
                for piece in self._pieces_of(entry, max(start, entry.start), min(start + size, entry.stop)):
                    common = intersection(piece.box, wanted)
                    if common is not None:
                        yield file, piece.box, common

    def _pieces_of(self, entry: LayoutEntry, low: int, high: int) -> Iterator[LayoutPiece]:
        start = low
        for whole in boxes_of(entry.sizes, low - entry.start, high - entry.start):
            for offsets, sizes in cut_box(whole, self.most_elements):
                place = tuple(a + b for a, b in zip(offsets, entry.offsets, strict=True))
                stop = start + math.prod(sizes)
                yield LayoutPiece(entry, (place, sizes), start, stop)
                start = stop

    @cached_property
    def _starts(self) -> list[int]:
        return [entry.start for entry in self.entries]


def boxes_of(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """The elements ``low`` to ``high`` of a row-major tensor as rectangles, in order: at most 2 d - 1 of them."""
    if low >= high:
        return
    if len(shape) <= 1:
        yield ((low,), (high - low,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-low // row), high // row  # whole rows
    if first > last:  # all of it inside one row
        yield from _within_row(shape, last, low - last * row, high - last * row)
        return
    yield from _within_row(shape, first - 1, low - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _within_row(shape, last, 0, high - last * row)


def cut_box(box: Box, most_elements: int) -> Iterator[Box]:
    """Cut a rectangle from ``boxes_of`` into rectangles of at most so many elements, in the order of its elements."""
    offsets, sizes = box
    if math.prod(sizes) <= most_elements:
        yield box
        return
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    step = max(1, most_elements // math.prod(sizes[dim + 1 :]))
    for low in range(0, sizes[dim], step):
        place = (*offsets[:dim], offsets[dim] + low, *offsets[dim + 1 :])
        part = (*sizes[:dim], min(step, sizes[dim] - low), *sizes[dim + 1 :])
        yield from cut_box((place, part), most_elements)


def intersection(one: Box, other: Box) -> Box | None:
    """What two rectangles share; None: nothing."""
    low = tuple(map(max, one[0], other[0]))
    sizes = tuple(min(a + m, b + n) - c for a, m, b, n, c in zip(one[0], one[1], other[0], other[1], low, strict=True))
    return (low, sizes) if all(size > 0 for size in sizes) else None


def flat_index(place: Sequence[int], shape: Sequence[int]) -> int:
    """The number of an element of a row-major tensor."""
    index = 0
    for position, size in zip(place, shape, strict=True):
        index = index * size + position
    return index


def _within_row(shape: Sequence[int], row: int, low: int, high: int) -> Iterator[Box]:
    for offsets, sizes in boxes_of(shape[1:], low, high):
        yield (row, *offsets), (1, *sizes)
