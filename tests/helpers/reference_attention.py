"""The slow, obvious twin: one process computes one whole sequence at a time.

Plain attention is PyTorch's public attention function. Rules and sinks are written out as in transformers' eager
attention: there is a full matrix of scores, to which a sink adds a column.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bytescale.attention.rules import PLAIN, AttentionRules


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    rules: AttentionRules = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of sequences that lie one after the other.

    Args:
        q: ``[T, H, D]``; k: ``[T, G, D]``; v: ``[T, G, Dv]``; G divides H.
        lengths: tokens of each sequence; they sum to T.
        rules: what this layer does differently.
        sinks: ``[H]`` learned logits that join every softmax, or None.

    Returns:
        ``[T, H, Dv]``. Autograd alone derives its gradient.
    """
    outputs = []
    pieces = zip(*(tensor.split(list(lengths)) for tensor in (q, k, v)), strict=True)
    for sequence_q, sequence_k, sequence_v in pieces:
        if rules == PLAIN and sinks is None:
            out = F.scaled_dot_product_attention(
                sequence_q.transpose(0, 1)[None],
                sequence_k.transpose(0, 1)[None],
                sequence_v.transpose(0, 1)[None],
                is_causal=True,
                enable_gqa=True,
            )
            outputs.append(out[0].transpose(0, 1))
        else:
            outputs.append(_written_out(sequence_q, sequence_k, sequence_v, rules, sinks))
    return torch.cat(outputs)


def _written_out(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules, sinks: Tensor | None) -> Tensor:
    """One sequence: ``q [S, H, D]``, ``k [S, G, D]``, ``v [S, G, Dv]`` -> ``[S, H, Dv]``."""
    groups = q.shape[1] // k.shape[1]
    k, v = (rows.repeat_interleave(groups, dim=1) for rows in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * rules.scale_of(q)
    if rules.soft_cap is not None:
        scores = torch.tanh(scores / rules.soft_cap) * rules.soft_cap
    places = torch.arange(len(q), device=q.device)
    distance = places[:, None] - places[None, :]
    hidden = distance < 0
    if rules.window is not None:
        hidden = hidden | (distance >= rules.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(q)]
    return torch.einsum("hts,shd->thd", weights, v)
