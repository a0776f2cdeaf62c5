"""Attention in which each query looks at keys that were chosen for it (DeepSeek Sparse Attention, block selection).

Queries stay where they are. Rows with keys and values of earlier tokens come to them (``earlier``). Of multi-head
latent attention these rows are the latents, of which keys AND values are columns, so that 576 numbers a token travel
and not all heads' keys and values. Work and memory are linear in the number of chosen keys.

Backward fetches the rows again, and sums their gradients in the LSE's dtype: on this rank, then over members.

Shape letters: T query rows, n rows that arrive, H query heads, G key/value heads, W numbers of a row and head, D of
which a key has, Dv a value; I selections, one for all heads or one for each of G; K chosen keys of a query.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bytescale.attention.autocast import without_autocast
from bytescale.attention.earlier import EarlierRows
from bytescale.attention.kernels import lse_dtype
from bytescale.attention.rings.messages import Kind
from bytescale.attention.sinks import join_sinks, sinks_gradient

NONE = -1
"""Stands in a selection where fewer keys than usual are chosen."""
_NUMBERS = 2**22
"""Of the rows that are copied together for some queries at a time."""


@dataclass(frozen=True)
class RowForm:
    """Which columns of a row ``[G, W]`` are the key and the value, and the factor of ``q . k``."""

    keys: slice
    values: slice
    scale: float


def selected_attention(
    q: Tensor, rows: Tensor, chosen: Tensor, form: RowForm, earlier: EarlierRows, sinks: Tensor | None = None,
    heard: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """``q [T, H, D]``, ``rows [T, G, W]``, ``chosen [T, I, K]`` -> ``[T, H, Dv]``.

    ``chosen`` are places among the rows of ``earlier.fetch``, at least one of each query, without repetition, or
    ``NONE``. ``sinks [H]`` are learned logits, or None. All members of a group have to call it together. Where backward
    puts the probabilities, summed over heads, ``[T, K]`` in the LSE's dtype: ``heard``.
    """
    out: Tensor = _SelectedAttention.apply(q, rows, sinks, chosen, form, (earlier, heard))
    return out


class _SelectedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, rows: Tensor, sinks: Tensor | None, chosen: Tensor, form: RowForm,
        others: tuple[EarlierRows, list[Tensor] | None],
    ) -> Tensor:  # fmt: skip
        ctx.earlier, ctx.heard = earlier, _ = others

        def compute() -> tuple[Tensor, Tensor]:
            out, lse = forward(q, earlier.fetch(rows, Kind.FORWARD_KV), chosen, form)
            return (out, lse) if sinks is None else join_sinks(out, lse, sinks)

        with without_autocast(q.device):
            out, lse = earlier.attention.remembered(compute)
        ctx.form = form
        ctx.save_for_backward(q, rows, sinks, chosen, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, rows, sinks, chosen, out, lse = ctx.saved_tensors
        (dout,) = gradients
        with without_autocast(q.device):
            of_sinks = sinks_gradient(dout, out, lse, sinks) if ctx.needs_input_grad[2] else None
            all_rows = ctx.earlier.fetch(rows, Kind.BACKWARD_KV)
            sums = None if ctx.heard is None else lse.new_zeros(len(q), chosen.shape[2])
            dq, d_rows = backward(dout, q, all_rows, chosen, ctx.form, out, lse, over_heads=sums)
            if sums is not None:
                ctx.heard[:] = [sums]
            d_rows = ctx.earlier.give_back(d_rows, Kind.BACKWARD_GRADIENTS).to(rows.dtype)
        return dq, d_rows, of_sinks, None, None, None


def forward(q: Tensor, rows: Tensor, chosen: Tensor, form: RowForm) -> tuple[Tensor, Tensor]:
    """``q [T, H, D]``, ``rows [T + n, G, W]``, ``chosen [T, I, K]`` -> ``out [T, H, Dv]``, ``lse [T, H]``."""
    out = q.new_empty(*q.shape[:2], len(range(rows.shape[2])[form.values]))
    lse = q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))
    for some, _, keys, scores in _scores(q, rows, chosen, form):
        lse[some] = scores.logsumexp(-1).flatten(1)
        weights = (scores - lse[some].view(*scores.shape[:3], 1)).exp().to(q.dtype)
        out[some] = (weights @ keys[..., form.values]).flatten(1, 2)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, rows: Tensor, chosen: Tensor, form: RowForm, out: Tensor, lse: Tensor,
    *, over_heads: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of ``q``, and of ``rows`` in the dtype of ``lse``; ``out`` and ``lse`` include sinks.

    ``over_heads [T, K]`` is given the sums over heads of the probabilities.
    """
    dq, d_rows = torch.empty_like(q), torch.zeros_like(rows, dtype=lse.dtype)
    by_head = d_rows.view(-1, rows.shape[2])
    sums = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    for some, places, keys, scores in _scores(q, rows, chosen, form):
        weights = (scores - lse[some].view(*scores.shape[:3], 1)).exp()
        if over_heads is not None:
            over_heads[some] = weights.sum((1, 2))
        upper = dout[some].view(*scores.shape[:3], -1)
        of_weights = (upper @ keys[..., form.values].mT).to(lse.dtype)
        of_scores = (weights * (of_weights - sums[some].view(*scores.shape[:3], 1)) * form.scale).to(q.dtype)
        dq[some] = (of_scores @ keys[..., form.keys]).flatten(1, 2)
        gradient = torch.zeros_like(keys, dtype=lse.dtype)
        gradient[..., form.keys] = of_scores.mT @ q[some].view(*scores.shape[:3], -1)
        gradient[..., form.values] += weights.to(q.dtype).mT @ upper
        by_head.index_add_(0, places.flatten(), gradient.flatten(0, 2))
    return dq, d_rows


def _scores(
    q: Tensor, rows: Tensor, chosen: Tensor, form: RowForm
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:  # fmt: skip
    """For some queries at a time: which, places ``[t, G, K]`` among rows and heads, ``keys [t, G, K, W]``, and
    scores ``[t, G, H / G, K]`` in the dtype of the LSE, minus infinity where nothing is chosen.
    """
    num_heads, by_head = rows.shape[1], rows.reshape(-1, rows.shape[2])
    heads = torch.arange(num_heads, device=q.device)[:, None]
    step = max(1, _NUMBERS // max(1, chosen.shape[2] * num_heads * rows.shape[2]))
    for first in range(0, len(q), step):
        some = slice(first, first + step)
        of_all = chosen[some].expand(-1, num_heads, -1)
        places = of_all.clamp(min=0) * num_heads + heads
        keys = by_head[places]
        queries = q[some].unflatten(1, (num_heads, -1))
        scores = (queries @ keys[..., form.keys].mT).to(lse_dtype(q.dtype)) * form.scale
        yield some, places, keys, scores.masked_fill((of_all == NONE)[:, :, None], -torch.inf)
