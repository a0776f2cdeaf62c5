"""Mixture of experts: a router sends each token to K of E feed-forward blocks, and no token is ever dropped.

Tokens are sorted by expert, so that the rows of each expert are contiguous. One grouped matrix product per projection
then serves all experts, including those without a token.

Shape letters: T tokens, C hidden size, E experts, K experts of a token, F feed-forward width, R = T K rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale.config.architecture import Architecture
from bytescale.models.balance import BalanceSums, count_tokens
from bytescale.models.llama import SwiGLU, swiglu

ExpertProducts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, SwiGLU], Tensor]
"""``(rows [R, C] sorted by expert, rows_per_expert [E], gate, up, down, swiglu) -> [R, C]``"""


class MixtureOfExperts(nn.Module):
    """``[T, C] -> [T, C]``: the sum of the chosen experts' outputs, weighted by the router.

    Attributes:
        balance: sums for the load-balancing loss, gathered during backward; None: there is no such loss.
    """

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.experts_per_token = shape.experts_per_token
        self.balance = BalanceSums(shape) if shape.router_aux_loss_weight else None
        self.router = Router(shape)
        self.experts = Experts(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.router(hidden, self.balance)
        weights, chosen = route(logits, self.experts_per_token)
        return self.experts(hidden, chosen, weights)


class Router(nn.Module):
    """Logits of every expert in fp32 (fp64 for an fp64 model), whatever the dtype of the weights."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size))

    def forward(self, hidden: Tensor, balance: BalanceSums | None = None) -> Tensor:
        """``hidden [T, C] -> [T, E]``. In backward, the tokens are added to ``balance``."""
        return _RouterLogits.apply(hidden, self.weight, balance)


class Experts(nn.Module):
    """SwiGLU blocks side by side: gate and up ``[E, F, C]``, down ``[E, C, F]``. ``swiglu`` may be replaced."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.swiglu: SwiGLU = swiglu
        wide = (shape.num_experts, shape.ffn_hidden_size, shape.hidden_size)
        self.gate_proj = nn.Parameter(torch.empty(wide))
        self.up_proj = nn.Parameter(torch.empty(wide))
        self.down_proj = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size, shape.ffn_hidden_size))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """``hidden [T, C], chosen [T, K] int64, weights [T, K] -> [T, C]``, as transformers' modules of experts.

        Rows are sorted by a permutation, and each token's K rows are summed in a fixed order: bitwise reproducible.
        """
        num_tokens, num_chosen = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        rows_per_expert = count_tokens(chosen, len(self.gate_proj))
        rows = hidden[:, None].expand(-1, num_chosen, -1).reshape(num_tokens * num_chosen, hidden.shape[1])
        products = expert_products(hidden.dtype)
        rows = _Permute.apply(rows, order, place)
        rows = products(rows, rows_per_expert, self.gate_proj, self.up_proj, self.down_proj, self.swiglu)
        rows = _Permute.apply(rows, place, order).view(num_tokens, num_chosen, hidden.shape[1])
        return (rows * weights[..., None]).sum(1).to(hidden.dtype)


def route(logits: Tensor, experts_per_token: int) -> tuple[Tensor, Tensor]:
    """``logits [T, E]`` -> weights ``[T, K]``, which sum to one, and experts ``[T, K]`` int64, most likely first."""
    weights, chosen = logits.softmax(dim=-1).topk(experts_per_token, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), chosen


def expert_products(dtype: torch.dtype) -> ExpertProducts:
    """The function for a dtype: grouped products, except for fp64.

    ``grouped_mm`` does not support fp64 (torch 2.13), which serves checks only.
    """
    return looped_products if dtype == torch.float64 else grouped_products


def grouped_products(
    rows: Tensor, rows_per_expert: Tensor, gate: Tensor, up: Tensor, down: Tensor, swiglu: SwiGLU = swiglu
) -> Tensor:
    """All experts in one grouped matrix product per projection."""
    stops = rows_per_expert.cumsum(0).to(torch.int32)
    inner = swiglu(_grouped(rows, gate, stops), _grouped(rows, up, stops))
    return _grouped(inner, down, stops)


def looped_products(
    rows: Tensor, rows_per_expert: Tensor, gate: Tensor, up: Tensor, down: Tensor, swiglu: SwiGLU = swiglu
) -> Tensor:
    """The slow twin: one expert after another."""
    parts = [
        F.linear(swiglu(F.linear(own, gate[expert]), F.linear(own, up[expert])), down[expert])
        for expert, own in enumerate(rows.split(rows_per_expert.tolist()))
    ]
    return torch.cat(parts)


def _grouped(rows: Tensor, weights: Tensor, stops: Tensor) -> Tensor:
    """``rows [R, in] x weights [E, out, in] -> [R, out]``, expert e on rows ``stops[e - 1]`` to ``stops[e]``."""
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=stops)


class _Permute(torch.autograd.Function):
    """``rows[order]``. Its gradient is ``gradient[place]``, by the inverse permutation: no scattered additions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return gradients[0][place], None, None


class _RouterLogits(torch.autograd.Function):
    """``hidden @ weight.T`` in fp32 without keeping fp32 copies. Its backward adds the tokens to the balance sums.

    They are added in backward because it runs exactly once per micro-batch, whether or not the layer is recomputed.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, balance: BalanceSums | None) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logits = F.linear(hidden.to(wide), weight.to(wide))
        ctx.save_for_backward(hidden, weight, logits)
        ctx.balance = balance
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, logits = ctx.saved_tensors
        (d_logits,) = gradients
        hidden_wide = hidden.to(logits.dtype)
        if ctx.balance is not None:
            ctx.balance.add(logits, hidden_wide)
        d_hidden = d_logits @ weight.to(logits.dtype)
        return d_hidden.to(hidden.dtype), (d_logits.T @ hidden_wide).to(weight.dtype), None
