"""The collectives of sequence parallelism: rows gathered and scattered over the tensor-parallel ranks.

Rank r of N has the rows ``[r n, (r + 1) n)`` of T, with ``n = ceil(T / N)``: the last ranks may have fewer, or none.
Messages are padded to n rows a rank; the padding never reaches the model.

The backward of products of gathered rows with weights (``project``) starts to sum the rows' gradient over ranks as soon
as it exists, and computes the weights' gradients while it travels. Every product is whole, as in the slow twin, so both
give the same bits. Products of some of the rows would also hide gathers, but libraries choose another order of sums for
another number of rows (docs/LOG.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale.runtime.group import PendingCollective, RankGroup


class TokenShards:
    """One rank's view. ``begin`` sets the number of tokens T for the calls that follow."""

    def __init__(self, tp: RankGroup, *, overlap: bool = True) -> None:
        """``overlap``: whether messages travel beside products. The slow twin, without overlap, gives the same bits."""
        self.tp = tp
        self.overlap = overlap
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

    def project(self, rows: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """``rows [T, in]`` by each of ``linears``, which have no bias, ``-> [T, out]``.

        If ``rows`` come from ``gather``, backward sums their gradient over ranks while it computes the weights'.
        """
        gather = rows.grad_fn
        if self.overlap and isinstance(gather, _Gather._backward_cls) and gather.partial_gradients:  # type: ignore
            result: Sequence[Tensor] = _Products.apply(rows, gather, *(linear.weight for linear in linears))
            return result
        return [linear(rows) for linear in linears]


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
        ctx.started = None  # a _PendingSum, from the backward of _Products
        ctx.set_materialize_grads(False)
        return _all_rows(rows, tp, num_tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        (gradient,), started = gradients, ctx.started
        ctx.started = None
        if started is not None:
            assert gradient is None, "rows that _Products takes have no other use, whose gradient would be left out"
            return started.wait(), None, None, None
        if gradient is None:
            return None, None, None, None
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


class _Products(torch.autograd.Function):
    """Products of gathered rows with weights. Its backward leaves the rows' gradient with ``gather``, on its way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows, *weights)
        ctx.gather = gather
        return tuple(F.linear(rows, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        # 1. The gradient of rows is summed in autograd's order, which begins with the last product.
        total: Tensor | None = None
        for gradient, weight in zip(reversed(gradients), reversed(weights), strict=True):
            part = gradient.mm(weight)
            total = part if total is None else total.add_(part)
        assert total is not None, "there are weights"
        ctx.gather.started = _start_sum(total, ctx.gather.tp)
        # 2. While it travels: the gradients of weights, each in one product of all rows.
        needed = ctx.needs_input_grad[2:]
        own = (gradient.t().mm(rows) if need else None for gradient, need in zip(gradients, needed, strict=True))
        return None, None, *own


@dataclass
class _PendingSum:
    """A sum over ranks that has been started; nobody may touch ``full [count * size, ...]`` before ``wait``."""

    full: Tensor
    own: slice
    pending: PendingCollective

    def wait(self) -> Tensor:
        """This rank's rows of the sum, ``[t, ...]``."""
        self.pending.wait()
        return self.full[self.own]


def _start_sum(partial: Tensor, tp: RankGroup) -> _PendingSum:
    """Start ``_sum_own_rows``, in ``partial`` itself if it needs no padding."""
    count = -(-len(partial) // tp.size)
    full = _padded(partial, count * tp.size)
    first = tp.rank * count
    pending = tp.start_reduce_scatter(full.view(-1)) if count else PendingCollective(tp, None)
    return _PendingSum(full, slice(first, first + num_own_rows(len(partial), tp)), pending)


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
