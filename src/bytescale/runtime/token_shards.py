"""The collectives of sequence parallelism: rows gathered and scattered over the tensor-parallel ranks.

Rank r of N has the rows ``[r n, (r + 1) n)`` of T, with ``n = ceil(T / N)``: the last ranks may have fewer, or none.
Messages are padded to n rows a rank; the padding never reaches the model.

What is multiplied with weights travels in slices: slice k holds some of the n rows of every rank. While one slice is
multiplied, the next one is gathered (before q, k, v, gate and up), or the last one is summed over ranks (behind o and
down). The gradients of weights are products of all rows, computed while the gradient of the rows travels.

How many slices there are follows from T and the weights, so the slow twin, which waits for every message at once, has
the same products and gives the same bits.

Shape letters: T tokens, N ranks, n rows of a rank, t of them not padding, m rows of a rank in one slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale.attention.autocast import in_autocast
from bytescale.runtime.group import PendingCollective, RankGroup
from bytescale.runtime.saved.checkpointing import save_now

MOST_SLICES = 4
"""A quarter of a message cannot be hidden then. More slices would make small products, and messages, slower."""
LEAST_WORK = {"cuda": 2e10, "cpu": 1e8}
"""Floating-point operations of a slice's products: 50 us on a GPU and 2 ms on a core of a CPU, at the rates of
`cost/assumed.py`. In less time than that, starting a message of its own is not hidden either."""


class TokenShards:
    """One rank's view."""

    def __init__(self, tp: RankGroup, *, overlap: bool = True, least_work: float | None = None) -> None:
        """``overlap``: whether messages travel beside products; without, it is the slow twin, of the same bits.

        ``least_work``: the products, in floating-point operations, that are worth a message of their own; by default
        ``LEAST_WORK`` of the device.
        """
        self.tp = tp
        self.overlap = overlap
        self.least_work = least_work
        self.num_tokens = 0

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

    def gather_and_project(self, rows: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """``gather(rows [t, in])`` by each of ``linears``, which have no bias, ``-> [T, out]``, beside its products."""
        if self.num_tokens == 0:
            return [linear(rows) for linear in linears]
        weights = [in_autocast(linear.weight) for linear in linears]
        result: Sequence[Tensor] = _GatheredProducts.apply(in_autocast(rows), self._slices(weights), *weights)
        return result

    def project_and_scatter(self, rows: Tensor, linear: nn.Linear) -> Tensor:
        """``scatter`` of ``rows [T, in]`` by ``linear``, which has no bias, ``-> [t, out]``, beside its products."""
        if self.num_tokens == 0:
            return linear(rows)
        rows, weight = in_autocast(rows), in_autocast(linear.weight)
        saved, ticket = save_now(rows, weight)
        return _ScatteredProduct.apply(rows, weight, ticket, saved, self._slices([weight]))

    def _slices(self, weights: Sequence[Tensor]) -> _Slices:
        least = self.least_work or LEAST_WORK["cpu" if weights[0].device.type == "cpu" else "cuda"]
        work = 2 * self.num_tokens * sum(weight.numel() for weight in weights)
        return _Slices(self.tp, self.num_tokens, self.overlap, max(1, min(MOST_SLICES, int(work / least))))


class _Slices:
    """How T rows travel: ``[N, n, ...]`` in at most ``most`` slices ``[N, m, ...]``. T is at least 1."""

    def __init__(self, tp: RankGroup, num_tokens: int, overlap: bool, most: int) -> None:
        self.tp = tp
        self.num_tokens = num_tokens
        self.num_own = len(own_rows(num_tokens, tp))
        self.count = -(-num_tokens // tp.size)  # n
        self._overlap = overlap
        rows = -(-self.count // most)  # m
        self._places = [slice(first, min(first + rows, self.count)) for first in range(0, self.count, rows)]

    def gathered(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The slices ``[N, m, ...]`` of all ranks' ``rows [t, ...]``, with places; the next is under way already."""
        padded = _padded(rows, self.count)
        full, pending = self._start_gather(padded[self._places[0]])
        for place, following in zip(self._places, [*self._places[1:], None], strict=True):
            pending.wait()
            ready = full
            if following is not None:
                full, pending = self._start_gather(padded[following])
            yield place, ready

    def of(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        by_rank = self.by_rank(rows)
        return ((place, by_rank[:, place]) for place in self._places)

    def by_rank(self, rows: Tensor) -> Tensor:
        """``[T, ...] -> [N, n, ...]``."""
        return _padded(rows, self.count * self.tp.size).unflatten(0, (self.tp.size, self.count))

    def start_sum(self, partial: Tensor) -> PendingCollective:
        """Start to sum ``partial [N, m, ...]`` over ranks: afterwards this rank's ``partial[r]`` holds the sum."""
        return self._started(self.tp.start_reduce_scatter(partial.view(-1)))

    def _start_gather(self, rows: Tensor) -> tuple[Tensor, PendingCollective]:
        full = rows.new_empty(self.tp.size, *rows.shape)
        full[self.tp.rank] = rows
        return full, self._started(self.tp.start_all_gather(full.view(-1)))

    def _started(self, pending: PendingCollective) -> PendingCollective:
        if not self._overlap:
            pending.wait()
        return pending


class _Collected:
    """Slices ``[N, m, ...]`` put together: ``[T, ...]``. A single slice is not copied."""

    def __init__(self, slices: _Slices) -> None:
        self._slices = slices
        self._rows: Tensor | None = None

    def put(self, place: slice, part: Tensor) -> None:
        if part.shape[1] == self._slices.count:
            self._rows = part
            return
        if self._rows is None:
            self._rows = part.new_empty(len(part), self._slices.count, *part.shape[2:])
        self._rows[:, place] = part

    def rows(self) -> Tensor:
        assert self._rows is not None, "there is at least one slice"
        return self._rows.flatten(0, 1)[: self._slices.num_tokens]


def own_rows(num_tokens: int, tp: RankGroup) -> range:
    count = -(-num_tokens // tp.size)
    return range(min(tp.rank * count, num_tokens), min((tp.rank + 1) * count, num_tokens))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, tp: RankGroup, num_tokens: int, partial_gradients: bool) -> Tensor:
        ctx.tp, ctx.partial_gradients = tp, partial_gradients
        return _all_rows(rows, tp, num_tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.partial_gradients:
            return _sum_own_rows(gradients[0], ctx.tp), None, None, None
        own = own_rows(len(gradients[0]), ctx.tp)
        return gradients[0][own.start : own.stop], None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, tp: RankGroup) -> Tensor:
        ctx.tp, ctx.num_tokens = tp, len(partial)
        return _sum_own_rows(partial, tp)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_rows(gradients[0], ctx.tp, ctx.num_tokens), None


class _GatheredProducts(torch.autograd.Function):
    """All ranks' rows by each of some weights ``[out, in]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slices: _Slices, *weights: Tensor) -> tuple[Tensor, ...]:
        everyone, products = _Collected(slices), [_Collected(slices) for _ in weights]
        for place, part in slices.gathered(rows):
            everyone.put(place, part)
            for product, weight in zip(products, weights, strict=True):
                product.put(place, F.linear(part, weight))
        ctx.save_for_backward(everyone.rows(), *weights)
        ctx.slices = slices
        return tuple(product.rows() for product in products)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        slices: _Slices = ctx.slices
        rows, *weights = ctx.saved_tensors
        # 1. The gradient of rows is summed in the order of plain autograd, which begins with the last product.
        total: Tensor | None = None
        for gradient, weight in zip(reversed(gradients), reversed(weights), strict=True):
            part = gradient.mm(weight)
            total = part if total is None else total.add_(part)
        assert total is not None, "there are weights"
        total = slices.by_rank(total)
        pending = slices.start_sum(total)
        # 2. While it travels: the gradients of weights, each in one product of all rows.
        needed = ctx.needs_input_grad[2:]
        own = [gradient.t().mm(rows) if need else None for gradient, need in zip(gradients, needed, strict=True)]
        pending.wait()
        return total[slices.tp.rank, : slices.num_own], None, *own


class _ScatteredProduct(torch.autograd.Function):
    """This rank's rows of a sum over ranks: each rank's rows by its weight ``[out, in]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ticket: Tensor, saved: Any, slices: _Slices) -> Tensor:
        ctx.saved, ctx.slices = saved, slices
        result = rows.new_empty(slices.count, len(weight))
        sent: list[tuple[slice, Tensor, PendingCollective]] = []
        for place, part in slices.of(rows):
            partial = F.linear(part, weight).contiguous()
            sent.append((place, partial, slices.start_sum(partial)))
            if len(sent) == 2:
                _arrive(sent.pop(0), slices.tp.rank, result)
        _arrive(sent.pop(), slices.tp.rank, result)
        return result[: slices.num_own]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        slices: _Slices = ctx.slices
        rows, weight = ctx.saved()
        everyone, d_rows = _Collected(slices), _Collected(slices)
        for place, part in slices.gathered(gradients[0]):
            everyone.put(place, part)
            d_rows.put(place, part @ weight)
        d_weight = everyone.rows().t().mm(rows) if ctx.needs_input_grad[1] else None
        return d_rows.rows(), d_weight, None, None, None


def _arrive(message: tuple[slice, Tensor, PendingCollective], rank: int, result: Tensor) -> None:
    place, partial, pending = message
    pending.wait()
    result[place] = partial[rank]


def _all_rows(rows: Tensor, tp: RankGroup, num_tokens: int) -> Tensor:
    """Every rank's rows, in order: ``[T, ...]``."""
    if num_tokens == 0:
        return rows.new_empty(0, *rows.shape[1:])
    count = -(-num_tokens // tp.size)
    full = rows.new_empty(count * tp.size, *rows.shape[1:])
    tp.all_gather(full, _padded(rows, count))
    return full[:num_tokens]


def _sum_own_rows(partial: Tensor, tp: RankGroup) -> Tensor:
    """This rank's rows of the sum over ranks: ``[t, ...]``."""
    num_tokens = len(partial)
    if num_tokens == 0:
        return partial
    padded = _padded(partial, -(-num_tokens // tp.size) * tp.size)
    return tp.reduce_scatter(padded)[: len(own_rows(num_tokens, tp))]


def _padded(rows: Tensor, count: int) -> Tensor:
    """``rows``, contiguous, padded with zeros to ``count`` rows."""
    if len(rows) == count:
        return rows.contiguous()
    padded = rows.new_zeros(count, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded
