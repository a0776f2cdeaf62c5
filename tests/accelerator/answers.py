"""What Python is told by tensors of a simulated accelerator: where they are, and what moves, pins, or reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor, _tensor_symint_registry
from torch.utils._device import _device_constructors

from tests.accelerator import operators
from tests.accelerator.clocks import Clock, Event, Stream, join
from tests.accelerator.device import Machine, here, machine
from tests.accelerator.memory import Place


def _named(own: Machine, device: Any) -> torch.device:
    """The device that a caller names. A number is an accelerator's, which PyTorch without one would not take."""
    named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    assert named.type != "cuda" or named.index in (None, own.device.index), f"{named} is the GPU of another rank"
    return named


def _make(own: Machine, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A factory function, perhaps with a device; one that is like another tensor is where that is."""
    if kwargs.get("device") is None and not kwargs.get("pin_memory") and func.__name__.endswith(operators.SHAPES_ALONE):
        return func(*args, **kwargs)
    pinned, device = kwargs.pop("pin_memory", False), kwargs.pop("device", None)
    device = None if device is None else _named(own, device)
    if device is not None and device.type not in ("cpu", "cuda"):
        return func(*args, device=device, **kwargs)
    place: Place = "device" if device is not None and device.type == "cuda" else "pinned" if pinned else "host"
    own.making.append(place)
    try:
        made = func(*args, **kwargs) if device is None else func(*args, device="cpu", **kwargs)
    finally:
        own.making.pop()
    if place == "device" and func.__name__ in _FROM_DATA:
        data = args[1] if func.__name__ == "new_tensor" else args[0]
        if isinstance(data, Tensor):
            return made if own.place(data) == place else move(own, data, place)
        own.add(made, place)
        own.run(own.current, [], [made], "copy")
        own.host_waits(f"{func.__name__}() of numbers of the host")
    return made


_FROM_DATA = ("tensor", "as_tensor", "asarray", "new_tensor")


class _Moved(torch.autograd.Function):
    """A copy between host and device, whose gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, own: Machine, place: Place, dtype: Any, non_blocking: bool) -> Tensor:
        ctx.own, ctx.place, ctx.dtype = own, own.place(tensor), tensor.dtype
        own.making.append(place)
        try:
            moved = torch.empty_like(tensor, dtype=dtype)
        finally:
            own.making.pop()
        return moved.copy_(tensor, non_blocking=non_blocking)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return move(ctx.own, gradients[0], ctx.place, ctx.dtype), None, None, None, None


def move(own: Machine, tensor: Tensor, place: Place, dtype: Any = None, non_blocking: bool = False) -> Tensor:
    """A copy of a tensor in other memory."""
    result: Tensor = _Moved.apply(tensor, own, place, dtype or tensor.dtype, non_blocking)
    return result


def _device(own: Machine, func: Any, tensor: Tensor) -> torch.device:
    real: torch.device = func(tensor)
    return own.device if real.type == "cpu" and own.place(tensor) == "device" else real


def _to(own: Machine, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    given = [*args, *kwargs.values()]
    other = next((one for one in given if isinstance(one, Tensor)), None)
    names = (one for one in given if isinstance(one, torch.device | str | int) and not isinstance(one, bool))
    device = next((_named(own, one) for one in names), None)
    if device is not None and device.type not in ("cpu", "cuda"):
        return func(tensor, *args, **kwargs)  # type: ignore[no-any-return]
    wanted: Place = own.place(tensor)
    if other is not None:
        wanted = own.place(other)
    elif device is not None:
        wanted = "device" if device.type == "cuda" else "host"
    if (wanted == "device") != (own.place(tensor) == "device"):
        if isinstance(tensor, NestedTensor):
            return _nested_to(own, func, tensor, *args, **kwargs)
        dtype = next((one for one in given if isinstance(one, torch.dtype)), None if other is None else other.dtype)
        flags = [one for one in args if isinstance(one, bool)]
        return move(own, tensor, wanted, dtype, kwargs.get("non_blocking", flags[0] if flags else False))
    kept = [one for one in args if isinstance(one, bool) or not isinstance(one, torch.device | str | int | None)]
    named = {name: one for name, one in kwargs.items() if name not in ("device", "non_blocking")}
    if not [one for one in [*kept, *named.values()] if not isinstance(one, bool)] and not named.get("copy", False):
        return tensor
    return func(tensor, *kept, **named)  # type: ignore[no-any-return]


def _parse_to(own: Machine, func: Any, *args: Any, **kwargs: Any) -> Any:
    """By which modules and tensordicts read what their ``to`` is given."""
    if args and isinstance(args[0], int):
        args = (_named(own, args[0]), *args[1:])
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = _named(own, kwargs["device"])
    return func(*args, **kwargs)


def _nested_to(own: Machine, func: Any, tensor: NestedTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Values and offsets, which stand for the same lengths there, as PyTorch's own copy has it."""
    values, offsets = _to(own, func, tensor.values(), *args, **kwargs), tensor.offsets()
    there = move(own, offsets, own.place(values))
    _tensor_symint_registry[there] = _tensor_symint_registry[offsets]
    made: Tensor = torch.nested.nested_tensor_from_jagged(values, there, jagged_dim=tensor._ragged_idx)
    return made


def _pin(own: Machine, func: Any, tensor: Tensor, *unused: Any) -> Tensor:
    assert own.place(tensor) != "device", "only host memory is pinned"
    return tensor if own.place(tensor) == "pinned" else move(own, tensor, "pinned")


def _read(own: Machine, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Functions that take a tensor's numbers to Python."""
    if own.place(tensor) == "device":
        if func.__name__ != "tolist":
            raise TypeError("a tensor of the device has no NumPy array: call cpu() first")
        own.run(own.current, [tensor], [], func.__name__)
        own.host_waits(func.__name__)
    else:
        own.run_on_host([tensor], [], func.__name__)
    with own.aside():
        return func(tensor, *args, **kwargs)


def _record_stream(own: Machine, func: Any, tensor: Tensor, stream: Stream) -> None:
    memory = own.allocator.find(tensor)
    assert memory is not None, "record_stream is for tensors of the device"
    memory.recorded.add(stream.number)


def _deep_copy(own: Machine, func: Any, tensor: Tensor, memo: Any) -> Any:
    copied = func(tensor, memo)
    own.add(copied, own.place(tensor))
    return copied


def _is_cuda(own: Machine, func: Any, tensor: Tensor) -> bool:
    return own.place(tensor) == "device"


_TO = Tensor.to
_GETTERS: dict[str, Callable[..., Any]] = {
    "device": _device,
    "is_cuda": _is_cuda,
    "is_cpu": lambda own, func, tensor: func(tensor) and not _is_cuda(own, func, tensor),
}
_METHODS: dict[str, Callable[..., Any]] = {
    "get_device": lambda own, func, tensor: own.device.index if _is_cuda(own, func, tensor) else -1,
    "to": _to,
    "cuda": lambda own, func, tensor, *_, **named: _to(own, _TO, tensor, own.device, **named),
    "cpu": lambda own, func, tensor: _to(own, _TO, tensor, "cpu"),
    "pin_memory": _pin,
    "is_pinned": lambda own, func, tensor, *_: own.place(tensor) == "pinned",
    "tolist": _read,
    "numpy": _read,
    "__array__": _read,
    "record_stream": _record_stream,
    "__deepcopy__": _deep_copy,
    **{f"new_{name}": _make for name in ("tensor", "empty", "zeros", "ones", "full", "empty_strided")},
}
_FACTORIES = (
    *("tensor", "as_tensor", "asarray", "empty", "zeros", "ones", "full", "arange", "eye", "linspace", "rand", "randn"),
    *("randint", "randperm", "empty_strided", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like"),
    *("randn_like", "randint_like", "scalar_tensor", "tril_indices", "triu_indices"),
)


def _wrapper(own: Machine, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A tensor around others (nested ones), which are on the device; itself it has no memory."""
    cpu = torch.device("cpu")
    given = [cpu if isinstance(one, torch.device) and one.type == "cuda" else one for one in args]
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        kwargs["device"] = cpu
    return func(*given, **kwargs)


def _answered(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` outside of a rank's host, else the answer."""

    def call(*args: Any, **kwargs: Any) -> Any:
        own = here()
        return original(*args, **kwargs) if own is None else answer(own, original, *args, **kwargs)

    call.__name__ = original.__name__
    return call


@contextmanager
def _tensors_answer() -> Iterator[None]:
    getters = {name: property(_answered(getattr(Tensor, name).__get__, answer)) for name, answer in _GETTERS.items()}
    methods = {name: _answered(getattr(Tensor, name), answer) for name, answer in _METHODS.items()}
    factories = {name: _answered(getattr(torch, name), _make) for name in _FACTORIES}
    _device_constructors()  # it keeps what it finds first, by which ``with torch.device("meta")`` knows the factories
    make = staticmethod(_answered(Tensor._make_wrapper_subclass, _wrapper))
    methods["_make_wrapper_subclass"] = make  # type: ignore[assignment]
    with mock.patch.multiple(Tensor, **getters, **methods), mock.patch.multiple(torch, **factories):
        yield


@contextmanager
def simulated() -> Iterator[None]:
    """``torch.cuda`` of simulated machines, for all threads."""

    @contextmanager
    def use(stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        own = stream.machine
        with ExitStack() as entered:
            if here() is None:  # a thread that helps the rank's own
                entered.enter_context(own.running())
            before, own.current = own.current, stream
            try:
                yield
            finally:
                own.current = before

    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        """Storage that is given back, or made again, in place."""
        memory = machine().allocator._known.get(storage._cdata) if here() else None
        if memory is not None:
            machine().allocator.give_back(memory)
            memory.num_bytes = size
        return resize(storage, size)

    properties = SimpleNamespace(total_memory=2**36, multi_processor_count=132, name="simulated", major=9, minor=0)
    with (
        _tensors_answer(),
        mock.patch.multiple(
            torch.cuda,
            Stream=lambda device=None, priority=0: machine().make_stream(),
            Event=Event,
            stream=use,
            current_stream=lambda device=None: machine().current,
            default_stream=lambda device=None: machine().compute,
            synchronize=lambda device=None: _synchronize(),
            get_device_properties=lambda device=None: properties,
            mem_get_info=lambda device=None: (2**36, 2**36),
            get_rng_state=lambda device=None: torch.get_rng_state(),
            set_rng_state=lambda state, device=None: torch.set_rng_state(state),
            get_device_capability=lambda device=None: (9, 0),
            current_device=lambda: machine().device.index,
        ),
        mock.patch.object(torch.UntypedStorage, "resize_", resized),
        mock.patch.object(torch._C._nn, "_parse_to", _answered(torch._C._nn._parse_to, _parse_to)),
    ):
        yield


def _synchronize() -> None:
    own = machine()
    everything: Clock = {}
    for timeline in own.timelines[1:]:
        join(everything, timeline.clock)
    own.host_waits("torch.cuda.synchronize", everything)
