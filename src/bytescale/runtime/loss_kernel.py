"""Triton kernels for the softmax cross-entropy of BF16 logits (the paper's FusedSoftmaxCrossEntropy, section 7).

The kernels read BF16 logits, compute in fp32, and write the gradient in BF16 over the logits. There are two kernels, so
that ranks that share a vocabulary can exchange their statistics in between. This module needs Triton, which comes with
CUDA builds of PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192  # logits of a row that one program holds at a time: 16 KiB of BF16
_WARPS = 16


@triton.jit
def _statistics_kernel(logits, row_stride, targets, lse_out, target_out, VOCAB: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program i: row i's log-sum-exp by a running maximum and sum, and the logit of its target."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    target = tl.load(targets + row)
    largest = float("-inf")
    total = 0.0
    for start in range(0, VOCAB, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32)
        grown = tl.maximum(largest, tl.max(values, axis=0))
        total = total * tl.exp(largest - grown) + tl.sum(tl.exp(values - grown), axis=0)
        largest = grown
    tl.store(lse_out + row, largest + tl.log(total))
    here = (target >= 0) & (target < VOCAB)
    tl.store(target_out + row, tl.load(logits + target, mask=here, other=0.0).to(tl.float32))


@triton.jit
def _gradient_kernel(logits, row_stride, targets, lse_in, z_loss, VOCAB: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program i: row i's logits become softmax * (1 + 2 z lse) - one_hot."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    target = tl.load(targets + row)
    lse = tl.load(lse_in + row)
    factor = 1.0 + 2.0 * z_loss * lse
    for start in range(0, VOCAB, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < VOCAB
        values = tl.load(logits + columns, mask=inside, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(values - lse) * factor
        gradient = tl.where(columns == target, gradient - 1.0, gradient)
        tl.store(logits + columns, gradient.to(tl.bfloat16), mask=inside)


class TritonRows:
    """``loss.TorchRows`` for contiguous BF16 logits ``[n, V]`` on a GPU; statistics are fp32."""

    def statistics(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        lse = logits.new_empty(len(logits), dtype=torch.float32)
        picked = torch.empty_like(lse)
        self._launch(_statistics_kernel, logits, targets, lse, picked)
        return lse, picked

    def gradient(self, logits: Tensor, targets: Tensor, lse: Tensor, z_loss: float) -> Tensor:
        self._launch(_gradient_kernel, logits, targets, lse, z_loss)
        return logits

    @staticmethod
    def _launch(kernel: Any, logits: Tensor, targets: Tensor, *more: Any) -> None:
        rows, vocab = logits.shape
        block = min(_BLOCK, triton.next_power_of_2(vocab))
        kernel[(rows,)](logits, logits.stride(0), targets, *more, VOCAB=vocab, BLOCK=block, num_warps=_WARPS)
