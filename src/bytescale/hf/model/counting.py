"""What operators make, seen as they run: bytes that live, operations, and shapes on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class LiveBytes(TorchDispatchMode):
    """While active: ``now`` and ``peak`` bytes of storages made inside, each counted once, until it is freed.

    What a kernel allocates for itself, without returning it, is not seen. ``products``: floating-point operations,
    without attention's, which ``encoders.work_of`` adds. (PyTorch's own counter hooks the modules of all threads.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.products = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outside = {tensor.untyped_storage()._cdata for tensor in _tensors((*args, *kwargs.values()))}
        result = func(*args, **kwargs)
        count = flop_registry.get(getattr(func, "_overloadpacket", None))
        if count is not None and "attention" not in str(func):
            self.products += count(*args, **kwargs, out_val=result)
        for tensor in _tensors((result,)):
            if tensor.untyped_storage()._cdata not in outside:
                self._born(tensor)
        return result

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


class OnMeta(TorchDispatchMode):
    """While active, a copy from the meta device to host memory copies nothing. PyTorch would refuse it.

    What a shape becomes is worked out once: PyTorch does so in Python, in 0.1 ms for each operator of each layer.
    """

    made: ClassVar[dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta:
            return args[0]
        key = (func, _shapes(given := (*args, *(kwargs or {}).items())))
        if made := self.made.get(key):
            return torch.empty_strided(made[0], made[1], dtype=made[2], device="meta")
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and result.is_meta and not func._schema.is_mutable:
            place = result.untyped_storage()._cdata
            if all(own.is_meta and own.untyped_storage()._cdata != place for own in _tensors(given)):
                self.made[key] = result.shape, result.stride(), result.dtype
        return result


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return tuple(map(_shapes, value)) if isinstance(value, list | tuple) else (type(value), value)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among an operator's arguments or results. Their lists are flat; PyTorch's trees take ten times as long."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
