"""Counts the bytes of living tensors, as a device's allocator does."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
        outside = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = self.compute(func, args, kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in outside:
                self._born(leaf)
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
