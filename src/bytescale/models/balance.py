"""The load-balancing loss of a mixture of experts, exact over the global batch, without a collective in any layer.

The loss, for L layers, E experts, K of them per token, and all T tokens of the GLOBAL batch (there is no padding)::

    f[l, e] = how often layer l's router chose expert e, over T        (sums to K; no gradient)
    P[l, e] = mean over the T tokens of the router's probability of e   (sums to 1)
    loss    = weight * E / L * sum over l and e of f[l, e] * P[l, e]    (Switch Transformer, equations 4 to 6)

1. The loss acts on the ROUTERS alone: their input is treated as constant. (Hugging Face lets the gradient flow on into
   the layers below.)
2. The gradient is then linear in f, which is known only after the last forward, with coefficients that each rank sums
   up token by token. With p the probabilities of a token and h its hidden state, row j of the router's weight has::

       weight * E / (L T) * sum over e of (f[l, j] - f[l, e]) * B[l, e, j],     B[l, e, j] = sum over tokens p[e] p[j] h

Each rank keeps B ``[E, E, C]`` per layer (1 MiB for Mixtral 8x7B) and 2 L E sums. After the last backward the ranks add
up the sums in one collective, and each rank adds ITS part of the gradient. For one layer the value equals that of
Hugging Face's ``load_balancing_loss_func``.

Shape letters: T tokens, C hidden size, E experts, K experts of a token, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from bytescale.config.architecture import Architecture


def count_tokens(chosen: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs in ``chosen [T, K]``, ``[E]`` int64. (``bincount`` would wait for the GPU.)"""
    return (chosen.reshape(-1, 1) == torch.arange(num_experts, device=chosen.device)).sum(0)


class BalanceSums:
    """Sums over the tokens of one layer on this rank, since ``reset``.

    Attributes:
        counts, probabilities: ``[E]`` fp64, sums of choices and of the router's probabilities.
        products: ``[E, E, C]`` in the logits' dtype, the sum of ``p[e] p[j] h``. All three are None before the first
            token.
    """

    def __init__(self, shape: Architecture) -> None:
        self.experts_per_token = shape.experts_per_token
        self.reset()

    def reset(self) -> None:
        """Forget the tokens of the previous step."""
        self.counts: Tensor | None = None
        self.probabilities: Tensor | None = None
        self.products: Tensor | None = None

    def add(self, logits: Tensor, hidden: Tensor) -> None:
        """Add tokens: ``logits [T, E]`` and the router's input ``hidden [T, C]``, of the same dtype."""
        p = logits.softmax(dim=-1)
        num_experts = p.shape[1]
        chosen = p.topk(self.experts_per_token, dim=-1).indices
        if self.counts is None or self.probabilities is None or self.products is None:
            self.counts = p.new_zeros(num_experts, dtype=torch.float64)
            self.probabilities = torch.zeros_like(self.counts)
            self.products = p.new_zeros(num_experts, num_experts, hidden.shape[1])
        self.counts += count_tokens(chosen, num_experts)
        self.probabilities += p.sum(0, dtype=torch.float64)
        pairs = (p[:, :, None] * p[:, None, :]).flatten(1)
        self.products.view(-1, hidden.shape[1]).addmm_(pairs.T, hidden)


class HasWeight(Protocol):
    """A router. Its weight may be replaced after it was made."""

    weight: nn.Parameter


class BalanceLoss:
    """The loss over all layers that this rank holds."""

    def __init__(self, shape: Architecture, layers: Sequence[tuple[BalanceSums, HasWeight]]) -> None:
        """``layers``: the sums and the router (weight ``[E, C]``) of each layer. A stage holds some of the L layers."""
        self.shape = shape
        self.layers = list(layers)

    def reset(self) -> None:
        """Forget the previous step. Called before a step's first forward."""
        for sums, _ in self.layers:
            sums.reset()

    def sums(self) -> Tensor:
        """This rank's counts and probabilities, ``[layers, 2, E]`` fp64: to be added up over all ranks."""
        device = self.layers[0][1].weight.device
        total = torch.zeros(len(self.layers), 2, self.shape.num_experts, dtype=torch.float64, device=device)
        for row, (sums, _) in zip(total, self.layers, strict=True):
            if sums.counts is not None and sums.probabilities is not None:
                row[0], row[1] = sums.counts, sums.probabilities
        return total

    def loss(self, total: Tensor) -> Tensor:
        """The loss, from the sums of all ranks. Its gradient is THIS rank's part of the routers' gradients."""
        shape = self.shape
        num_tokens = total[:, 0].sum(-1, keepdim=True).clamp_min(1) / shape.experts_per_token  # [layers, 1]
        fractions, means = (total[:, part] / num_tokens for part in (0, 1))
        scale = shape.router_aux_loss_weight * shape.num_experts / shape.num_layers
        value = scale * (fractions * means).sum()
        # A term of value zero that has this gradient: so autograd accumulates it like all other gradients.
        carriers = []
        for layer, (sums, router) in enumerate(self.layers):
            if sums.products is None:
                continue
            wide = sums.products.dtype
            f = fractions[layer].to(wide)
            gradient = torch.einsum("ej,ejc->jc", f[None, :] - f[:, None], sums.products)
            gradient *= scale / float(num_tokens[layer])
            carriers.append((router.weight.to(wide) * gradient).sum())
        if not carriers:
            return value
        carrier = torch.stack(carriers).sum()
        return value + (carrier - carrier.detach())
