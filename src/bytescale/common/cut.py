"""Describes the part of a parameter that a tensor-parallel rank holds, or a rank with some of the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One of ``count`` equal parts of a parameter along ``dim``. ``replicas`` ranks hold the same part."""

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

    @property
    def start(self) -> int:
        """First index of the part along ``dim``."""
        return self.index * (self.shape[self.dim] // self.count)

    @property
    def part_shape(self) -> tuple[int, ...]:
        if self.count == 1:
            return self.shape
        return (*self.shape[: self.dim], self.shape[self.dim] // self.count, *self.shape[self.dim + 1 :])

    def of(self, whole: Any) -> Any:
        """Return this part of the tensor ``whole``, as a view. This layer does not import torch."""
        return whole if self.count == 1 else whole.narrow(self.dim, self.start, self.part_shape[self.dim])
