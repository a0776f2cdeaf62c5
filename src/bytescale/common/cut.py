"""Which part of a parameter a tensor-parallel rank has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar


class Array(Protocol):
    """A tensor: this floor works without torch."""

    def narrow(self, dim: int, start: int, length: int) -> Self: ...


T = TypeVar("T", bound=Array)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One of ``count`` equal parts along ``dim``; ``replicas`` ranks hold the same one."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int = 0
    index: int = 0
    """Which part."""
    count: int = 1
    replicas: int = 1
    """Tensor-parallel ranks with this very part. Their gradients have to be summed, and it counts once in the norm."""
    replica: int = 0
    """Which of them this rank is."""

    @property
    def start(self) -> int:
        """First row (along ``dim``) of the part."""
        return self.index * (self.shape[self.dim] // self.count)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of the part."""
        if self.count == 1:
            return self.shape
        return (*self.shape[: self.dim], self.shape[self.dim] // self.count, *self.shape[self.dim + 1 :])

    def of_row(self) -> Cut:
        """The cut of ``whole[i]``, for any i (not of a parameter that is cut along its first dimension)."""
        return replace(self, shape=self.shape[1:], dim=max(self.dim - 1, 0))

    def of(self, whole: T) -> T:
        """The part of a whole parameter, a view."""
        return whole if self.count == 1 else whole.narrow(self.dim, self.start, self.part_shape[self.dim])
