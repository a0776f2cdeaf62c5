"""Describes the part of a parameter that a tensor-parallel rank holds, or a rank with some of the experts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One of ``count`` equal parts of a parameter along ``dim``. ``replicas`` ranks hold the same part.

    With ``packs`` above 1, the parameter is that many matrices one behind the other along ``dim`` (gate and up), and
    the part has a part of each.
    """

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int = 0
    """Dimension along which the parameter is cut."""
    index: int = 0
    """Number of this part, from 0."""
    count: int = 1
    replicas: int = 1
    """Tensor-parallel ranks that hold this same part. Their gradients must be summed, and count once in the norm."""
    replica: int = 0
    """Number of this rank among the ``replicas`` ranks."""
    packs: int = 1

    @property
    def start(self) -> int:
        """First index of the part along ``dim``, in the first of its packs."""
        return self.index * (self.shape[self.dim] // self.count // self.packs)

    @property
    def part_shape(self) -> tuple[int, ...]:
        if self.count == 1:
            return self.shape
        return (*self.shape[: self.dim], self.shape[self.dim] // self.count, *self.shape[self.dim + 1 :])

    def boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes of rectangles of the whole parameter that make up the part, one behind the other."""
        dim, sizes = self.dim, self.part_shape
        start = self.start if self.count > 1 else 0
        if self.packs == 1:
            yield tuple(start if at == dim else 0 for at in range(len(sizes))), sizes
            return
        for *outer, pack in itertools.product(*map(range, self.shape[:dim]), range(self.packs)):
            offset = pack * (self.shape[dim] // self.packs) + start
            after = sizes[dim + 1 :]
            yield (*outer, offset, *(0 for _ in after)), (*(1 for _ in outer), sizes[dim] // self.packs, *after)

    def of(self, whole: Any) -> Any:
        """Return this part of the tensor ``whole``, as a view if it is one. This layer does not import torch."""
        if self.count == 1:
            return whole
        if self.packs == 1:
            return whole.narrow(self.dim, self.start, self.part_shape[self.dim])
        return self._in_packs(whole).flatten(self.dim, self.dim + 1)

    def put(self, part: Any, whole: Any) -> None:
        """Write this part to its place in the tensor ``whole``."""
        if self.count == 1:
            whole.copy_(part)
            return
        self._in_packs(whole).copy_(part.unflatten(self.dim, (self.packs, -1)))

    def _in_packs(self, whole: Any) -> Any:
        """A view of this part of ``whole``, with its packs in a dimension in front of ``dim``."""
        size = self.part_shape[self.dim] // self.packs
        return whole.unflatten(self.dim, (self.packs, -1)).narrow(self.dim + 1, self.start, size)
