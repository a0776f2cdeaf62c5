"""Cross-entropy straight from hidden states, chunk by chunk: the logits of all tokens never exist together.

Gradients are made in the same pass as the loss, while a chunk's logits are at hand (paper section 7 keeps logits in
BF16 and arithmetic in FP32; here they live only for one chunk). Sums, not means: the caller divides by the number of
targets in the GLOBAL batch, which no rank can know from its own tokens.

Shape letters: T tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token without a target."""

_CHUNK_LOGITS = 2**22
"""Logits that exist at a time: 16 MiB in fp32, which fits the last-level cache of a server CPU."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over tokens of ``-log softmax(hidden @ weight.T)[label]``.

    Args:
        hidden: ``[T, C]``; weight: ``[V, C]``, same dtype.
        labels: ``[T]`` int64 in ``[0, V)``, or ``IGNORE_INDEX`` for tokens without a target.

    Returns:
        Scalar in fp32 (fp64 for fp64 inputs). Zero, with zero gradients, when no token has a target.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels)


def reference_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The slow twin: all logits at once, PyTorch's own loss."""
    wide = _wide(hidden.dtype)
    return F.cross_entropy((hidden @ weight.T).to(wide), labels, ignore_index=IGNORE_INDEX, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        wide = _wide(hidden.dtype)
        needs_gradient = any(ctx.needs_input_grad[:2])
        loss = hidden.new_zeros((), dtype=wide)
        d_hidden = torch.zeros_like(hidden) if needs_gradient else None
        d_weight = torch.zeros_like(weight, dtype=wide) if needs_gradient else None
        with_target = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        for rows in with_target.split(max(1, _CHUNK_LOGITS // weight.shape[0])):
            chunk, targets = hidden[rows], labels[rows]
            logits = (chunk @ weight.T).to(wide)
            lse = logits.logsumexp(dim=1)
            loss += (lse - logits.gather(1, targets[:, None]).squeeze(1)).sum()
            if d_hidden is None or d_weight is None:
                continue
            # d loss / d logits = softmax - one_hot, made in the logits' own memory.
            d_logits = logits.sub_(lse[:, None]).exp_()
            d_logits[torch.arange(len(rows), device=rows.device), targets] -= 1.0
            d_logits = d_logits.to(hidden.dtype)
            d_hidden[rows] = d_logits @ weight
            d_weight += d_logits.T @ chunk
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = gradients
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * scale.to(d_hidden.dtype), (d_weight * scale).to(ctx.weight_dtype), None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
