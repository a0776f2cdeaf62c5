"""Activation checkpointing, applied to layers from outside: keep less in forward, compute it again in backward.

``full``: a layer keeps its input. Its ring of keys and values runs once more in backward; all members of a slice group
do so at the same place in their order, hence messages still match (same tags, first in first out).

``attention``: a layer keeps its input and attention's output and log-sum-exp, which cost O(s^2) to compute and O(s) to
keep; the O(s) rest is computed again. No message is sent twice.

Both are exact: backward sees the numbers that forward saw, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

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


def _checkpointed(forward: Callable[..., Tensor], extra: dict[str, Any]) -> Callable[..., Tensor]:
    def recomputing(*args: Any) -> Tensor:
        # Our layers draw no random numbers, so that their generators' states need not be kept.
        result: Tensor = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **extra)
        return result

    return recomputing


def _as_it_is(tensor: Any) -> Any:
    return tensor
