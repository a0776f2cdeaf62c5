"""Attention of blocks on one device: CPU flash, CUDA flash, and a slow twin written out in matrix products.

``flash`` decides which implementation of flash attention runs on CUDA.

A kernel computes every block of a ``BlockSet``. For the query rows of all blocks, in order, it returns the attention
output and the log-sum-exp (LSE) of the scores, with which partial results are merged. Backward takes the output and LSE
*of the whole softmax*, with which the gradient of each block is exact on its own.

Shape letters: T query rows, S key rows, H query heads, G key/value heads (G divides H), D head width of queries and
keys, Dv of values and outputs.
Dtypes: q, k, v and outputs have the compute dtype. LSE is fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bytescale.attention.blocks import BlockSet, Rows


class OfQueries(NamedTuple):
    """What backward knows of queries, of all rows that the keys may meet."""

    dout: Tensor  # [T, H, Dv] gradient of ``out``
    q: Tensor  # [T, H, D]
    out: Tensor  # [T, H, Dv] of the whole softmax
    lse: Tensor  # [T, H] of the whole softmax


class AttentionKernel(Protocol):
    """What the ring requires of a kernel."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockSet, scale: float) -> tuple[Tensor, Tensor]:
        """``q [T, H, D]``, ``k [S, G, D]``, ``v [S, G, Dv]`` -> ``out [Tq, H, Dv]``, ``lse [Tq, H]``.

        Tq is the number of query rows of all blocks.
        """

    def backward(
        self, queries: OfQueries, k: Tensor, v: Tensor, blocks: BlockSet, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``queries``, ``k [S, G, D]``, ``v [S, G, Dv]`` -> ``dq [Tq, H, D]``, ``dk [Sk, G, D]``, ``dv [Sk, G, Dv]``.

        The inputs hold all rows, and the kernel picks the rows of the blocks. Tq and Sk are the numbers of query rows
        and key rows of all blocks.
        """


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the LSE and of all sums over blocks: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class CpuFlashKernel:
    """ATen's CPU flash attention, with one call per block. On CPU this loop is the fastest way that was found.

    It supports no window, and causal blocks only with as many keys as queries. ``tiled`` computes the others.
    """

    @staticmethod
    def of_document(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """``q [1, H, T, D]``, ``k [1, G, T, D]``, ``v [1, G, T, Dv]`` of a document -> ``[1, T, H, Dv]``.

        With PyTorch's own backward, which costs the host less than a function in Python.
        """
        width = v.shape[3]
        q, k, v = _same_width(q, k, v)
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)[0]
        return _narrowed(out.transpose(1, 2), width)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockSet, scale: float) -> tuple[Tensor, Tensor]:
        width = v.shape[2]
        q, k, v = _same_width(q, k, v)
        out = q.new_empty(blocks.num_query_rows, *q.shape[1:])
        lse = q.new_empty(blocks.num_query_rows, q.shape[1], dtype=lse_dtype(q.dtype))
        for queries, keys, rows, _ in blocks.places():
            block_out, block_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *map(_heads_first, (q[queries], k[keys], v[keys])), 0.0, blocks.causal, scale=scale
            )
            out[rows], lse[rows] = block_out[0].transpose(0, 1), block_lse[0].transpose(0, 1)
        return _narrowed(out, width), lse

    def backward(
        self, queries: OfQueries, k: Tensor, v: Tensor, blocks: BlockSet, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out, lse = queries
        width, value_width = q.shape[2], v.shape[2]
        dout, q, k, v, out = _same_width(dout, q, k, v, out)
        dq = q.new_empty(blocks.num_query_rows, *q.shape[1:])
        dk = k.new_empty(blocks.num_key_rows, *k.shape[1:])
        dv = torch.empty_like(dk)
        for own, keys, rows, key_rows in blocks.places():
            given = (dout[own], q[own], k[keys], v[keys], out[own], lse[own])
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *map(_heads_first, given), 0.0, blocks.causal, scale=scale
            )
            dq[rows], dk[key_rows], dv[key_rows] = (part[0].transpose(0, 1) for part in gradients)
        return _narrowed(dq, width), _narrowed(dk, width), _narrowed(dv, value_width)


class CudaFlashKernel:
    """ATen's CUDA flash attention on packed rows: FlashAttention 2, or the implementation that ``flash`` has activated.

    One launch computes all blocks, which ``cu_seqlens`` delimits. It supports bf16 and fp16 only. Causal blocks may
    have a window, and more keys than queries: flash attention aligns the last query with the last key, as ``BlockSet``
    does.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockSet, scale: float) -> tuple[Tensor, Tensor]:
        width = v.shape[2]
        if not blocks:  # a sequence can have fewer tokens than the group has members, so some members hold none
            return q.new_empty(0, q.shape[1], width), q.new_empty(0, q.shape[1], dtype=torch.float32)
        q, k, v = _same_width(q, k, v)
        cu_q, cu_k, max_q, max_k = blocks.cu_seqlens(q.device)
        query_rows, key_rows = blocks.query_rows(q.device), blocks.key_rows(q.device)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q[query_rows],
            k[key_rows],
            v[key_rows],
            cu_q,
            cu_k,
            max_q,
            max_k,
            0.0,
            blocks.causal,
            False,
            scale=scale,
            **_window_of(blocks),
        )
        return _narrowed(out, width), lse.transpose(0, 1)

    def backward(
        self, queries: OfQueries, k: Tensor, v: Tensor, blocks: BlockSet, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out, lse = queries
        if not blocks:
            return q.new_empty(0, *q.shape[1:]), k.new_empty(0, *k.shape[1:]), v.new_empty(0, *v.shape[1:])
        width, value_width = q.shape[2], v.shape[2]
        dout, q, k, v, out = _same_width(dout, q, k, v, out)
        cu_q, cu_k, max_q, max_k = blocks.cu_seqlens(q.device)
        query_rows, key_rows = blocks.query_rows(q.device), blocks.key_rows(q.device)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout[query_rows].contiguous(),
            q[query_rows],
            k[key_rows],
            v[key_rows],
            out[query_rows],
            lse[query_rows].transpose(0, 1).contiguous(),
            cu_q,
            cu_k,
            max_q,
            max_k,
            0.0,
            blocks.causal,
            no_dropout,
            torch.empty(0, dtype=torch.uint64, device=q.device),
            scale=scale,
            **_window_of(blocks),
        )
        return _narrowed(dq, width), _narrowed(dk, width), _narrowed(dv, value_width)


@dataclass(frozen=True)
class MathKernel:
    """The slow twin: softmax and its gradient written out. It runs on any device in any dtype, with O(T S) memory.

    ``soft_cap``: the bound of the scores (``rules.AttentionRules``).
    """

    soft_cap: float | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockSet, scale: float) -> tuple[Tensor, Tensor]:
        out = q.new_empty(blocks.num_query_rows, q.shape[1], v.shape[2])
        lse = q.new_empty(blocks.num_query_rows, q.shape[1], dtype=lse_dtype(q.dtype))
        for queries, keys, rows, _ in blocks.places():
            scores, _ = self._scores(q[queries], k[keys], blocks, scale)
            block_lse = scores.logsumexp(dim=-1)
            weights = (scores - block_lse[..., None]).exp()
            values = _repeat_heads(v[keys], q.shape[1]).to(weights.dtype)
            out[rows] = torch.einsum("hts,shd->thd", weights, values).to(q.dtype)
            lse[rows] = block_lse.transpose(0, 1)
        return out, lse

    def backward(
        self, queries: OfQueries, k: Tensor, v: Tensor, blocks: BlockSet, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out, lse = queries
        dq = q.new_empty(blocks.num_query_rows, *q.shape[1:])
        dk = k.new_empty(blocks.num_key_rows, *k.shape[1:])
        dv = v.new_empty(blocks.num_key_rows, *v.shape[1:])
        groups = q.shape[1] // k.shape[1]
        for own, seen, rows, key_rows in blocks.places():
            scores, slope = self._scores(q[own], k[seen], blocks, scale)
            weights = (scores - lse[own].transpose(0, 1)[..., None]).exp()
            keys, values = (_repeat_heads(part[seen], q.shape[1]).to(weights.dtype) for part in (k, v))
            d, wide_q = dout[own].to(weights.dtype), q[own].to(weights.dtype)
            # d(softmax): P * (dP - rowsum(dO * O)), with O of the whole softmax.
            delta = (d * out[own].to(weights.dtype)).sum(dim=-1).transpose(0, 1)[..., None]
            dscores = weights * (torch.einsum("thd,shd->hts", d, values) - delta) * scale
            if slope is not None:
                dscores = dscores * slope
            dq[rows] = torch.einsum("hts,shd->thd", dscores, keys).to(q.dtype)
            dk[key_rows] = _sum_heads(torch.einsum("hts,thd->shd", dscores, wide_q), groups)
            dv[key_rows] = _sum_heads(torch.einsum("hts,thd->shd", weights, d), groups)
        return dq, dk, dv

    def _scores(self, q: Tensor, k: Tensor, blocks: BlockSet, scale: float) -> tuple[Tensor, Tensor | None]:
        """Return scores ``[H, T, S]`` in the dtype of the LSE, and the slope of the soft cap there, if there is one.

        Keys that a query does not see have -inf.
        """
        wide = lse_dtype(q.dtype)
        scores = torch.einsum("thd,shd->hts", q.to(wide), _repeat_heads(k, q.shape[1]).to(wide)) * scale
        slope = None
        if self.soft_cap is not None:
            bounded = torch.tanh(scores / self.soft_cap)
            scores, slope = bounded * self.soft_cap, 1 - bounded * bounded
        if blocks.causal:
            num_queries, num_keys = q.shape[0], k.shape[0]
            unseen = unseen_keys(num_queries, num_keys, num_keys - num_queries, blocks.window, q.device)
            scores = scores.masked_fill(unseen, float("-inf"))
        return scores, slope


def unseen_keys(num_queries: int, num_keys: int, own: int, window: int | None, device: torch.device) -> Tensor:
    """``[T, S]`` true where a query of a causal block does not see a key: behind its own, or before its window.

    ``own``: the place of the first query's own key among these keys.
    """
    everywhere = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    unseen = everywhere.triu(own + 1)
    return unseen if window is None else unseen | everywhere.tril(own - window)


def add_rows(total: Tensor, rows: Rows, part: Tensor) -> None:
    """Compute ``total[rows] += part``. Rows must not repeat. The sum is made in the wider of the two dtypes."""
    if isinstance(rows, slice):
        total[rows].add_(part)  # one pass that converts and adds
    else:
        total[rows] = (total[rows] + part).to(total.dtype)


def merge_rows(out: Tensor, lse: Tensor, rows: Rows, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a block's result into a running softmax, in place: ``out [T, H, D]`` and ``lse [T, H]`` at ``rows``.

    ``lse' = log(e^lse + e^part_lse)`` and ``out' = out e^(lse - lse') + part_out e^(part_lse - lse')``. Every row has
    already seen its own causal triangle, so ``lse`` is finite.
    """
    old = lse[rows]
    new = torch.logaddexp(old, part_lse)
    kept = (old - new).exp()[..., None]
    added = (part_lse - new).exp()[..., None]
    out[rows] = out[rows] * kept + part_out.to(out.dtype) * added
    lse[rows] = new


def _same_width(*tensors: Tensor) -> list[Tensor]:
    """The tensors ``[.., D]`` and ``[.., Dv]``, the narrower ones padded with zeros.

    Scores and outputs stay the same: zeros add nothing to a product, and columns of zeros in V give columns of zeros.
    """
    widest = max(tensor.shape[-1] for tensor in tensors)
    return [
        tensor if tensor.shape[-1] == widest else F.pad(tensor, (0, widest - tensor.shape[-1])) for tensor in tensors
    ]


def _narrowed(rows: Tensor, width: int) -> Tensor:
    """The first ``width`` columns: ``rows`` itself where there are no more, else a copy, so that the rest is freed."""
    return rows if rows.shape[-1] == width else rows[..., :width].contiguous()


def _window_of(blocks: BlockSet) -> dict[str, int]:
    """How flash attention is told of a window: by the number of keys before the query's own."""
    return {} if blocks.window is None else {"window_size_left": blocks.window - 1, "window_size_right": 0}


def _heads_first(rows: Tensor) -> Tensor:
    """Return ``[T, H, ...]`` rows as a ``[1, H, T, ...]`` view."""
    return rows.transpose(0, 1).unsqueeze(0)


def _repeat_heads(rows: Tensor, num_heads: int) -> Tensor:
    return rows.repeat_interleave(num_heads // rows.shape[1], dim=1)


def _sum_heads(gradient: Tensor, groups: int) -> Tensor:
    rows, heads, width = gradient.shape
    return gradient.view(rows, heads // groups, groups, width).sum(dim=2)
