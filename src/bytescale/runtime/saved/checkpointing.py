"""Activation checkpointing, applied to layers from outside: keep less in forward and compute it again in backward.

``full``: a layer keeps only its input. Its ring of keys and values runs a second time, in backward. All members of a
slice group run it again at the same place in their order, so messages still match (same tags, first in first out).

``attention``: a layer keeps its input, and the output and log-sum-exp of attention, which cost O(s^2) to compute and
O(s) to keep. The rest of the layer, which is O(s), is computed again. No message is sent twice.

In both modes backward sees the numbers that forward saw, bit for bit, and the operations that treat each row
independently (the norm and the feed-forward part) run in chunks of rows: of the 4 F numbers a token that the
feed-forward part saves (F: its width), those of a single chunk exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from bytescale.config.schema import Checkpointing

Pack = Callable[[Tensor], object]
Unpack = Callable[[Any], Tensor]


class KeptAttention:
    """Remembers what attention and recurrences gave, from forward to recomputation (``attention.AttentionMemory``)."""

    def __init__(self) -> None:
        self._pack: Pack = lambda tensor: tensor
        self._unpack: Unpack = lambda packed: packed
        self._writing: list[list[object]] | None = None
        self._reading: Iterator[list[object]] | None = None

    def keep_with(self, pack: Pack, unpack: Unpack) -> None:
        """Set how a kept tensor is stored: by the hooks of offloading, from which checkpointing hides these tensors."""
        self._pack, self._unpack = pack, unpack

    def recall(self) -> tuple[Tensor, ...] | None:
        """What was kept at this place, if this is a recomputation, else None. A layer asks in the order of forward."""
        if self._reading is None:
            return None
        return tuple(self._unpack(packed).detach() for packed in next(self._reading))

    def keep(self, *results: Tensor) -> None:
        """Store results if this forward will be recomputed; otherwise do nothing."""
        if self._writing is not None:
            # Detached: the graph owns what is kept here, and the output refers to the graph, so it would own itself.
            self._writing.append([self._pack(result.detach()) for result in results])

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """One for a layer's forward, one for its recomputation."""
        kept: list[list[object]] = []
        return self._around(writing=kept), self._around(reading=kept)

    @contextmanager
    def _around(
        self, writing: list[list[object]] | None = None, reading: list[list[object]] | None = None
    ) -> Iterator[None]:
        before = self._writing, self._reading
        self._writing, self._reading = writing, None if reading is None else iter(reading)
        try:
            yield
        finally:
            self._writing, self._reading = before


def apply_checkpointing(layers: Sequence[nn.Module], mode: Checkpointing, kept: KeptAttention) -> Callable[[], None]:
    """Make every layer recompute in backward. Returns a function that undoes it.

    Weights must not change between forward and backward. ``kept``: in mode ``attention``, what attention is given.
    """
    extra = {"context_fn": kept.contexts} if mode == "attention" else {}
    before = [(layer, vars(layer).get("forward")) for layer in layers if mode != "none"]
    for layer, _ in before:
        layer.forward = _checkpointed(layer, extra)

    def undo() -> None:
        for layer, forward in before:
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward

    return undo


@dataclass
class RowChunk:
    """How many rows row-wise parts process at a time."""

    rows: int


def apply_row_chunks(owner: nn.Module, method: str, chunk: RowChunk) -> Callable[[], None]:
    """Make ``owner.method``, ``[.., T, C] -> [.., T, C]``, which treats rows alone, process a ``chunk`` at a time.

    The method keeps its input and computes each chunk again in backward. Inputs of at most as many rows are
    processed as before. A recomputation of a layer that ends with the method skips it (``save_now``). Returns a
    function that undoes it.
    """
    before = vars(owner).get(method)
    function: Callable[[Tensor], Tensor] = getattr(owner, method)

    def chunked(rows: Tensor) -> Tensor:
        if rows.shape[-2] <= chunk.rows:
            return function(rows)
        saved, ticket = save_now(rows)
        result: Tensor = _RowChunks.apply(rows, ticket, saved, function, chunk.rows)
        return result

    setattr(owner, method, chunked)
    return (lambda: delattr(owner, method)) if before is None else (lambda: setattr(owner, method, before))


def save_now(*tensors: Tensor) -> tuple[Callable[[], tuple[Tensor, ...]], Tensor]:
    """Save tensors for a backward before its forward runs; an ``autograd.Function`` saves them only afterwards.

    ``torch.utils.checkpoint`` does not repeat work that follows the last saved tensor. Returns a function that gives
    the tensors in backward, and an empty tensor that the forward has to take.
    """
    kept: list[Any] = []
    ticket: Tensor = _Kept.apply(kept, *tensors)
    return lambda: kept[0].saved_tensors, ticket


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: list[Any], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.num_tensors = len(tensors)
        kept.append(ctx)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        return (None,) * (1 + ctx.num_tensors)


class _RowChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        ticket: Tensor,
        saved: Callable[[], tuple[Tensor, ...]],
        function: Callable[[Tensor], Tensor],
        chunk_rows: int,
    ) -> Tensor:
        ctx.saved, ctx.function, ctx.chunk_rows = saved, function, chunk_rows
        out = torch.empty_like(rows)
        for chunk, place in zip(rows.split(chunk_rows, -2), out.split(chunk_rows, -2), strict=True):
            place.copy_(function(chunk))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (rows,) = ctx.saved()
        total = torch.empty_like(rows)
        parts = (tensor.split(ctx.chunk_rows, -2) for tensor in (rows, gradients[0], total))
        for chunk, gradient, place in zip(*parts, strict=True):
            own = chunk.detach().requires_grad_()
            with torch.enable_grad():
                ctx.function(own).backward(gradient)
            assert own.grad is not None, "every row's output depends on the row"
            place.copy_(own.grad)
        return total, None, None, None, None


def _checkpointed(layer: nn.Module, extra: dict[str, Any]) -> Callable[..., Tensor]:
    """A method of ``layer``, so that a copy of the layer computes with its own weights."""
    given: Any = layer.forward
    own = getattr(given, "__self__", None) is layer
    forward = given.__func__ if own else lambda _, *args, **kwargs: given(*args, **kwargs)

    def recomputing(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        # A recomputation runs in backward, which has other context variables, and none of forward's modes.
        context, modes = copy_context(), _get_current_dispatch_mode_stack()

        def again(*given: Any) -> Tensor:
            with ExitStack() as stack:
                for mode in modes[len(_get_current_dispatch_mode_stack()) :]:
                    stack.enter_context(mode)
                return context.copy().run(forward, self, *given, **kwargs)

        # States of random generators are kept, so that dropout drops the same numbers again.
        result: Tensor = checkpoint(again, *args, use_reentrant=False, **extra)
        return result

    return MethodType(recomputing, layer)
