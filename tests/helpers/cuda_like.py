"""The allocations of CUDA's fused kernels, made on a CPU and filled with zeros, so that ``LiveBytes`` can count them.

The sizes come from PyTorch's sources: ``mha_varlen_fwd`` and ``mha_varlen_bwd`` in ATen's flash_api.cpp,
``_flash_attention_backward``, which makes contiguous copies, and the fused RMSNorm, which saves its input and one
number a row.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from bytescale.attention.blocks import BlockSet
from bytescale.attention.kernels import OfQueries


class CudaLikeFlash:
    """``CudaFlashKernel``'s tensors: results, and in backward sums of dq in fp32 and dk, dv of every query head."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockSet, scale: float) -> tuple[Tensor, Tensor]:
        rows, heads, width = blocks.num_query_rows, q.shape[1], q.shape[2]
        out, lse = q.new_zeros(rows, heads, width), q.new_zeros(heads, rows, dtype=torch.float32)
        return out, lse.T

    def backward(
        self, queries: OfQueries, k: Tensor, v: Tensor, blocks: BlockSet, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out, _ = queries
        query_rows, key_rows = blocks.query_rows(q.device), blocks.key_rows(q.device)
        rows, (heads, width) = q[query_rows].shape[0], q.shape[1:]
        copies = [tensor[query_rows].contiguous() for tensor in (dout, out)]  # none where rows lie one behind the other
        gradients = tuple(torch.zeros_like(tensor) for tensor in (q[query_rows], k[key_rows], v[key_rows]))
        padded = rows + 128 * len(blocks.queries)
        sums = [q.new_empty(padded * heads * size, dtype=torch.float32) for size in (1, width)]
        if k.shape[1] != heads:
            sums += [k.new_empty(blocks.num_key_rows, heads, width) for _ in range(2)]
        del copies, sums
        return gradients  # type: ignore[return-value]


def fuse_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """RMSNorm as one kernel, for the length of a test."""
    plain = nn.RMSNorm.forward

    def fused(self: nn.RMSNorm, rows: Tensor) -> Tensor:
        return _FusedNorm.apply(rows, self.weight, lambda x: plain(self, x))

    monkeypatch.setattr(nn.RMSNorm, "forward", fused)


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, norm: Any) -> Tensor:
        out = torch.empty_like(rows)
        with _disable_current_modes():
            out.copy_(norm(rows.detach()))
        ctx.norm = norm
        ctx.save_for_backward(rows, weight, rows.new_empty(len(rows), 1, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, _ = ctx.saved_tensors
        d_rows, d_weight = torch.empty_like(rows), torch.empty_like(weight)
        with _disable_current_modes(), torch.enable_grad():
            own = rows.detach().requires_grad_()
            numbers = torch.autograd.grad(ctx.norm(own), (own, weight), gradients[0])
            d_rows.copy_(numbers[0])
            d_weight.copy_(numbers[1])
        return d_rows, d_weight, None
