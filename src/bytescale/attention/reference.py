"""The slow, obvious twin: one process runs PyTorch's public attention function on one whole sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Compute causal attention of sequences that lie one after the other.

    Args:
        q: ``[T, H, D]``; k, v: ``[T, G, D]``; G divides H.
        lengths: tokens of each sequence; they sum to T.

    Returns:
        ``[T, H, D]``. Autograd alone derives its gradient.
    """
    outputs = []
    pieces = zip(*(tensor.split(list(lengths)) for tensor in (q, k, v)), strict=True)
    for sequence_q, sequence_k, sequence_v in pieces:
        out = F.scaled_dot_product_attention(
            sequence_q.transpose(0, 1)[None],
            sequence_k.transpose(0, 1)[None],
            sequence_v.transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=True,
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
