"""The slow twins: every recurrence token by token, as its paper writes it. Tests compare everything else with them.

Shape letters: T tokens, H heads, K width of keys (the state's rows), V of values (its columns); P, N rows and columns
of a Mamba state. No dtype is converted: in fp64 they compute in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Gated delta rule (arXiv 2412.06464, equation 10) and, with a decay per channel, KDA (arXiv 2510.26692).

    Args:
        q, k: ``[T, H, K]``; queries are scaled, and keys normalised.
        v: ``[T, H, V]``.
        log_decay: ``[T, H]``, or ``[T, H, K]`` for KDA.
        beta: ``[T, H]``.
        state: ``[H, K, V]`` before the first token.

    Returns ``[T, H, V]`` and the state after the last token.
    """
    rows = []
    decay = log_decay.exp().reshape(*log_decay.shape[:2], -1, 1)
    for t in range(len(q)):
        state = state * decay[t]
        wrong = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t] * beta[t, :, None], wrong)
        rows.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(rows), state


def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Mamba 2 (arXiv 2405.21060), and Mamba 1 (arXiv 2312.00752) with P = 1 and a channel as a head.

    Args:
        x: ``[T, H, P]``.
        dt: ``[T, H]`` step sizes, above 0.
        a: ``[H, 1]`` for Mamba 2, ``[H, N]`` for Mamba 1; below 0.
        b, c: ``[T, H, N]``.
        state: ``[H, P, N]`` before the first token.

    Returns ``[T, H, P]`` without the residual ``D x``, and the state after the last token.
    """
    rows = []
    for t in range(len(x)):
        decay = (a * dt[t, :, None]).exp()[:, None, :]
        state = state * decay + torch.einsum("hp,hn->hpn", x[t] * dt[t, :, None], b[t])
        rows.append(torch.einsum("hpn,hn->hp", state, c[t]))
    return torch.stack(rows), state


def lightning_attention(q: Tensor, k: Tensor, v: Tensor, ratio: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Lightning attention (arXiv 2401.04658): ``q, k [T, H, K]``, ``v [T, H, V]``, ``ratio [H]``, ``state [H, K, V]``.

    Returns ``[T, H, V]`` and the state after the last token.
    """
    rows = []
    for t in range(len(q)):
        state = state * ratio[:, None, None] + torch.einsum("hk,hv->hkv", k[t], v[t])
        rows.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(rows), state
