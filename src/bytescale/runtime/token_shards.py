"""The collectives of sequence parallelism: rows gathered and scattered over the tensor-parallel ranks.

Rank r of N has the rows ``[r n, (r + 1) n)`` of T, with ``n = ceil(T / N)``: the last ranks may have fewer, or none.
Messages are padded to n rows a rank; the padding never reaches the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bytescale.runtime.group import RankGroup


class TokenShards:
    """One rank's view. ``begin`` sets the number of tokens T for the calls that follow."""

    def __init__(self, tp: RankGroup) -> None:
        self.tp = tp
        self.num_tokens = 0

    @property
    def rank(self) -> int:
        return self.tp.rank

    @property
    def size(self) -> int:
        return self.tp.size

    def begin(self, num_tokens: int) -> None:
        """Set the number of tokens T that the following calls work on."""
        self.num_tokens = num_tokens

    def gather(self, rows: Tensor) -> Tensor:
        """All-gather ``[t, ...] -> [T, ...]``. In backward, the gradient is summed over ranks and scattered."""
        return _Gather.apply(rows, self.tp, self.num_tokens, True)

    def gather_for_loss(self, rows: Tensor) -> Tensor:
        """All-gather ``[t, ...] -> [T, ...]`` for a loss whose gradient is complete and the same on every rank."""
        return _Gather.apply(rows, self.tp, self.num_tokens, False)

    def scatter(self, partial: Tensor) -> Tensor:
        """Reduce-scatter: sum ``[T, ...]`` over ranks ``-> [t, ...]``. In backward, the gradient is gathered."""
        return _Scatter.apply(partial, self.tp)


def own_rows(num_tokens: int, rank: int, size: int) -> slice:
    """The rows of tensor-parallel rank ``rank`` of ``size``."""
    count = -(-num_tokens // size)
    return slice(min(rank * count, num_tokens), min((rank + 1) * count, num_tokens))


def num_own_rows(num_tokens: int, tp: RankGroup) -> int:
    """How many rows this rank has."""
    rows = own_rows(num_tokens, tp.rank, tp.size)
    return rows.stop - rows.start


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, tp: RankGroup, num_tokens: int, partial_gradients: bool) -> Tensor:
        ctx.tp, ctx.partial_gradients = tp, partial_gradients
        return _all_rows(rows, tp, num_tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        if ctx.partial_gradients:
            return _sum_own_rows(gradient, ctx.tp), None, None, None
        return gradient[own_rows(len(gradient), ctx.tp.rank, ctx.tp.size)], None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, tp: RankGroup) -> Tensor:
        ctx.tp, ctx.num_tokens = tp, len(partial)
        return _sum_own_rows(partial, tp)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_rows(gradients[0], ctx.tp, ctx.num_tokens), None


def _all_rows(rows: Tensor, tp: RankGroup, num_tokens: int) -> Tensor:
    """Every rank's rows, in order: ``[T, ...]``."""
    if num_tokens == 0:
        return rows.new_empty(0, *rows.shape[1:])
    count = -(-num_tokens // tp.size)
    padded = _padded(rows, count)
    full = rows.new_empty(count * tp.size, *rows.shape[1:])
    tp.all_gather(full, padded)
    return full[:num_tokens]


def _sum_own_rows(partial: Tensor, tp: RankGroup) -> Tensor:
    """This rank's rows of the sum over ranks: ``[t, ...]``."""
    num_tokens = len(partial)
    if num_tokens == 0:
        return partial
    count = -(-num_tokens // tp.size)
    shard = tp.reduce_scatter(_padded(partial, count * tp.size))
    return shard[: num_own_rows(num_tokens, tp)]


def _padded(rows: Tensor, count: int) -> Tensor:
    """``rows``, contiguous, padded with zeros to ``count`` rows."""
    if len(rows) == count:
        return rows.contiguous()
    padded = rows.new_zeros(count, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded
