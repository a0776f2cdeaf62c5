"""Stand-ins for a GPU: fake CUDA tensors, which have shapes, dtypes and devices but no memory, and no streams.

Operators run PyTorch's shape functions. So a call that the CUDA build would refuse because of its schema, dtypes,
shapes or devices fails here too. An operation that reads a number from the device (``item()``, ``nonzero()``) also
fails. Autograd's engine would need the streams of a GPU. Therefore backward walks through the graph in Python, node by
node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Variable
from torch.testing._internal.distributed.fake_pg import FakeStore

_NUMBERS = itertools.count(1)
_hooks: dict[tuple[Any, int], list[Callable[[torch.Tensor], Any]]] = {}
_callbacks: list[Callable[[], object]] = []
"""Of the backward that runs; autograd's engine calls them behind it."""
DEVICE = torch.device("cuda", 0)


class Stream:
    """Stands for ``torch.cuda.Stream``: copies run at once, and what waits for what is counted."""

    waits = 0

    def __init__(self, device: torch.device | None = None) -> None:
        del device

    def wait_event(self, event: Event) -> None:
        assert event.recorded, "waits for an event that nothing has recorded"
        Stream.waits += 1

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Event:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, **options: Any) -> None:
        del options
        self.recorded = False

    def synchronize(self) -> None:
        assert self.recorded, "the host waits for an event that nothing has recorded"

    def record(self, stream: Stream | None = None) -> None:
        assert stream is None or isinstance(stream, Stream)
        self.recorded = True


@contextmanager
def fake_gpu() -> Iterator[FakeTensorMode]:
    """Tensors that are made inside are fake; streams and events are stand-ins."""
    stand_ins = {
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: Stream(),
        "get_device_capability": lambda device=None: (9, 0),
    }
    engine = mock.patch.object(torch.autograd, "backward", backward)
    # Fake memory has no address; the offload tells pieces of memory apart by theirs.
    on_host = mock.patch.multiple(
        torch.Tensor, nonzero=nonzero, pin_memory=pin_memory, register_hook=register_hook, is_pinned=lambda _: False
    )
    queue = mock.patch.object(Variable, "_execution_engine", SimpleNamespace(queue_callback=_callbacks.append))
    addresses = mock.patch.object(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata)
    with mock.patch.multiple(torch.cuda, **stand_ins), engine, on_host, addresses, queue, FakeTensorMode() as mode:
        try:
            yield mode
        finally:
            _hooks.clear()
            _callbacks.clear()


def backward(root: torch.Tensor, gradient: torch.Tensor | None = None, *unused: Any, **options: Any) -> None:
    """``torch.autograd.backward`` of one tensor: every node once, when all gradients of its outputs are there."""
    assert not any(options.values()), "neither a graph of the backward nor chosen inputs"
    number = next(_NUMBERS)  # by which checkpointing knows that a recomputation serves all of one backward
    first = torch.autograd.graph.get_gradient_edge(root)  # of a leaf: what accumulates its gradient
    waiting = _uses(first.node)
    arrived: dict[Any, list[torch.Tensor | None]] = {}
    _arrive(arrived, first.node, first.output_nr, torch.ones_like(root) if gradient is None else gradient)
    ready: list[Any] = [first.node]
    while ready:
        node = ready.pop(max(range(len(ready)), key=lambda place: _turn(ready[place])))
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        with torch.no_grad(), mock.patch.object(torch._C, "_current_graph_task_id", return_value=number):
            results = _run(node, _hooked(node, arrived.pop(node)))
        assert len(results) == len(edges), f"{node} has {len(edges)} inputs and returned {len(results)} gradients"
        for (following, place), result in zip(edges, results, strict=True):
            _arrive(arrived, following, place, result)
            waiting[following] -= 1
            if waiting[following] == 0:
                ready.append(following)
    while _callbacks:
        with torch.no_grad():
            _callbacks.pop(0)()


def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """``Tensor.register_hook``: of nodes that are called from Python, the engine's own hooks do not run."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    _hooks.setdefault((edge.node, edge.output_nr), []).append(hook)


def _hooked(node: Any, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    for place, gradient in enumerate(gradients):
        for hook in _hooks.get((node, place), []) if gradient is not None else ():
            changed = hook(gradient)
            gradients[place] = gradient = gradient if changed is None else changed
    return gradients


def _turn(node: Any) -> float:
    """The order of autograd's engine: gradients are accumulated at once, and what ran last in forward comes next."""
    return float("inf") if node.name().endswith("AccumulateGrad") else float(node._sequence_nr())


def _uses(root: Any) -> dict[Any, int]:
    """How many edges lead to each node."""
    uses: dict[Any, int] = {}
    seen, stack = {root}, [root]
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is None:
                continue
            uses[following] = uses.get(following, 0) + 1
            if following not in seen:
                seen.add(following)
                stack.append(following)
    return uses


def _arrive(
    arrived: dict[Any, list[torch.Tensor | None]], node: Any, place: int, gradient: torch.Tensor | None
) -> None:
    given = arrived.setdefault(node, [None] * max(1, len(node._input_metadata)))
    if gradient is not None:
        shape = tuple(node._input_metadata[place].shape)
        gradient = gradient if tuple(gradient.shape) == shape else gradient.sum_to_size(shape)  # of a broadcast
        before = given[place]
        given[place] = gradient if before is None else before + gradient


def _run(node: Any, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """A node's gradients, one for each input that needs one."""
    wanted = [edge[0] is not None for edge in node.next_functions]
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        results = node(*gradients)
        listed = list(results) if isinstance(results, tuple) else [results]
        return [result for result, is_wanted in zip(listed, wanted, strict=False) if is_wanted]
    filled = [
        torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device) if gradient is None else gradient
        for gradient, like in zip(gradients, node._input_metadata, strict=True)
    ]
    results = node.apply(*filled)
    listed = list(results) if isinstance(results, tuple) else [results]
    return [result for result, needed in zip(listed, node.needs_input_grad, strict=True) if needed]


def nonzero(mask: torch.Tensor) -> torch.Tensor:
    """``Tensor.nonzero``: of a mask in CPU memory, every element; on the GPU the host would have to wait for it."""
    assert mask.device.type == "cpu", "nonzero() on the GPU makes the host wait"
    return torch.arange(len(mask))[:, None]


def pin_memory(host: torch.Tensor) -> torch.Tensor:
    """``Tensor.pin_memory``: a copy in CPU memory."""
    assert host.device.type == "cpu", "only CPU memory is pinned"
    return host.clone()


@contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[dist.ProcessGroup]:
    """This process as one rank of a group whose collectives and messages do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def expect(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ``AssertionError`` unless a tensor on the fake GPU has this shape and dtype."""
    seen = (tuple(tensor.shape), tensor.dtype, tensor.device)
    assert seen == (shape, dtype, DEVICE), f"expected {(shape, dtype, DEVICE)}, saw {seen}"
