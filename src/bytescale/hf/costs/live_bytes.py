"""Counts the bytes of living tensors, as a device's allocator does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """While active: ``now`` and ``peak`` bytes of storages made inside, each counted once, until it is freed.

    What a kernel allocates for itself, without returning it, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outside = {tensor.untyped_storage()._cdata for tensor in _tensors((*args, *kwargs.values()))}
        result = self.compute(func, args, kwargs)
        for tensor in _tensors((result,)):
            if tensor.untyped_storage()._cdata not in outside:
                self._born(tensor)
        return result

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator. Whoever needs its results' sizes alone may override it."""
        return func(*args, **kwargs)

    def _born(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._died, key)

    def _died(self, key: int) -> None:
        self.now -= self._alive.pop(key, 0)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among an operator's arguments or results. Their lists are flat; PyTorch's trees take ten times as long."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
