"""Activation checkpointing, applied to layers from outside: keep less in forward, compute it again in backward.

``full``: a layer keeps its input. Its ring of keys and values runs once more in backward; all members of a slice group
do so at the same place in their order, hence messages still match (same tags, first in first out).

``attention``: a layer keeps its input and attention's output and log-sum-exp, which cost O(s^2) to compute and O(s) to
keep; the O(s) rest is computed again. No message is sent twice.

Both are exact: backward sees the numbers that forward saw, bit for bit.

With either, what works on each row alone (norm and feed-forward part) is moreover done some rows at a time where there
are more: of the 4 F numbers a token that it saves, those of one chunk exist. Else they would decide how long a context
fits; what attention needs goes by groups of heads (``models.head_groups``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Checkpointing = Literal["none", "full", "attention"]

Pack = Callable[[Tensor], object]
Unpack = Callable[[Any], Tensor]


class KeptAttention:
    """Remembers attention's result from a layer's forward to its recomputation (``attention.AttentionMemory``)."""

    def __init__(self) -> None:
        self._pack: Pack = _as_it_is
        self._unpack: Unpack = _as_it_is
        self._writing: list[object] | None = None
        self._reading: list[object] | None = None

    def keep_with(self, pack: Pack, unpack: Unpack) -> None:
        """How a kept tensor is stored: the offload's own hooks, which checkpointing hides from it otherwise."""
        self._pack, self._unpack = pack, unpack

    def recall(self) -> tuple[Tensor, Tensor] | None:
        """Output and LSE, if this is a recomputation."""
        if self._reading is None:
            return None
        out, lse = (self._unpack(packed) for packed in self._reading)
        return out.detach(), lse.detach()

    def keep(self, out: Tensor, lse: Tensor) -> None:
        """Store a result, if this is a forward that will be recomputed."""
        if self._writing is not None:
            # Detached: the output gets its place in the autograd graph, which would then own itself.
            self._writing += [self._pack(out.detach()), self._pack(lse.detach())]

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Around one layer's forward, and around its recomputation."""
        kept: list[object] = []
        return self._around(writing=kept), self._around(reading=kept)

    @contextmanager
    def _around(self, writing: list[object] | None = None, reading: list[object] | None = None) -> Iterator[None]:
        before = self._writing, self._reading
        self._writing, self._reading = writing, reading
        try:
            yield
        finally:
            self._writing, self._reading = before


def apply_checkpointing(layers: Sequence[nn.Module], mode: Checkpointing) -> KeptAttention | None:
    """Make every layer recompute. Returns what attention has to be given in mode ``attention``.

    A layer's arguments are kept as they are, tensors among them by autograd; its weights are used again as they are at
    the time of backward, hence must not change in between.
    """
    if mode == "none":
        return None
    kept = KeptAttention() if mode == "attention" else None
    extra = {} if kept is None else {"context_fn": kept.contexts}
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, extra)
    return kept


def apply_row_chunks(owner: nn.Module, method: str, chunk_rows: int) -> None:
    """Make ``owner.method``, ``[T, C] -> [T, C]``, which treats rows independently, take ``chunk_rows`` at a time.

    It keeps its input and computes each chunk again in backward. Parameters' gradients are accumulated chunk by chunk,
    in order. Fewer rows go through it as before. Where it is the last part of a layer that is computed again, it is
    not computed for that: what follows a layer's last saved tensor is left out (``_Kept``).
    """
    function: Callable[[Tensor], Tensor] = getattr(owner, method)

    def chunked(rows: Tensor) -> Tensor:
        if len(rows) <= chunk_rows:
            return function(rows)
        kept: list[Any] = []
        ticket = _Kept.apply(rows, kept)
        result: Tensor = _RowChunks.apply(rows, ticket, kept, function, chunk_rows)
        return result

    setattr(owner, method, chunked)


class _Kept(torch.autograd.Function):
    """Saves a tensor before the work that needs it in backward, and not after, as that work itself would.

    ``torch.utils.checkpoint`` ends a recomputation when it has seen as many saved tensors as forward saved.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, kept: list[Any]) -> Tensor:
        ctx.save_for_backward(rows)
        kept.append(ctx)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class _RowChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        ticket: Tensor,
        kept: list[Any],
        function: Callable[[Tensor], Tensor],
        chunk_rows: int,
    ) -> Tensor:
        ctx.kept, ctx.function, ctx.chunk_rows = kept, function, chunk_rows
        out = torch.empty_like(rows)
        for chunk, place in zip(rows.split(chunk_rows), out.split(chunk_rows), strict=True):
            place.copy_(function(chunk))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (rows,) = ctx.kept[0].saved_tensors
        total = torch.empty_like(rows)
        parts = (tensor.split(ctx.chunk_rows) for tensor in (rows, gradients[0], total))
        for chunk, gradient, place in zip(*parts, strict=True):
            own = chunk.detach().requires_grad_()
            with torch.enable_grad():
                ctx.function(own).backward(gradient)
            assert own.grad is not None, "every row's output depends on the row"
            place.copy_(own.grad)
        return total, None, None, None, None


def _checkpointed(forward: Callable[..., Tensor], extra: dict[str, Any]) -> Callable[..., Tensor]:
    def recomputing(*args: Any) -> Tensor:
        # Our layers draw no random numbers, so that their generators' states need not be kept.
        result: Tensor = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **extra)
        return result

    return recomputing


def _as_it_is(tensor: Any) -> Any:
    return tensor
