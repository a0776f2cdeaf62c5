"""The load-balancing loss of a mixture of experts, exact over the global batch, without a collective in any layer.

The loss, for L layers, E experts, K of them per token, and all T tokens of the GLOBAL batch (there is no padding)::

    f[l, e] = how often layer l's router chose expert e, over T        (sums to K; no gradient)
    P[l, e] = mean over the T tokens of the router's probability of e   (sums to 1)
    loss    = weight * E / L * sum over l and e of f[l, e] * P[l, e]    (Switch Transformer, equations 4 to 6)

1. The loss acts on the ROUTERS alone: their input is treated as constant. (Hugging Face lets the gradient flow on into
   the layers below, and has the loss of a micro-batch, which depends on the plan.)
2. The gradient is then linear in f, which is known only after the last forward, with coefficients that each rank sums
   up token by token. With p the probabilities of a token and h its hidden state, row j of the router's weight has::

       weight * E / (L T) * sum over e of (f[l, j] - f[l, e]) * B[l, e, j],     B[l, e, j] = sum over tokens p[e] p[j] h

Each rank keeps B ``[E, E, C]`` per layer (1 MiB for Mixtral 8x7B) and 2 L E sums. A hook before each router adds the
tokens in its backward, which runs exactly once per micro-batch, whether or not the layer is recomputed. After the last
backward the ranks add up the sums in one collective, and each rank adds ITS part of the gradient. For one layer the
value equals that of Hugging Face's ``load_balancing_loss_func``.

Shape letters: T tokens, C hidden size, E experts, K experts of a token, L layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale.hf.model.interface import refusal, running_pass
from bytescale.hf.model.probe import ModelStructure
from bytescale.runtime.token_shards import own_rows


class HasRows(Protocol):
    """What is asked of an ``HFDecoder``."""

    model: nn.Module
    structure: ModelStructure
    token_rows: Any


class BalanceLoss:
    """The loss over all layers that this rank holds (``runtime.BatchLoss``)."""

    def __init__(self, decoder: HasRows, weight: float) -> None:
        """``decoder``: the whole model. Raises ``ConfigError`` where it has no routers of this kind."""
        self.decoder, self.weight, routers = decoder, weight, decoder.structure.routers
        if not routers:
            raise _refusal("the model")
        self.num_layers, self.num_experts = len(routers), routers[0].num_experts
        self.experts_per_token = routers[0].experts_per_token
        self.layers = [_LayerSums(decoder.model.get_submodule(own.name), self.experts_per_token) for own in routers]
        for own, sums in zip(routers, self.layers, strict=True):
            if not _is_plain(sums.router, self.experts_per_token):
                raise _refusal(own.name)
        for sums in self.layers:
            sums.router.register_forward_pre_hook(partial(_watch, decoder, sums))

    def keep(self, modules: set[nn.Module]) -> None:
        """This rank has a pipeline stage of the model, with these ``modules``."""
        self.layers = [sums for sums in self.layers if sums.router in modules]

    def reset(self, num_tokens: int = 0) -> None:
        """Forget the previous step. Called before a step's first forward. Tokens are counted where they are."""
        for sums in self.layers:
            sums.reset()

    def parameters(self) -> list[nn.Parameter]:
        """The weights of the routers: the loss acts on them alone."""
        return [sums.router.weight for sums in self.layers]

    def sums(self) -> Tensor:
        """This rank's counts and probabilities, ``[layers, 2, E]`` fp64: to be added up over all ranks."""
        device = next(p.device for p in self.decoder.model.parameters() if p.numel())
        total = torch.zeros(len(self.layers), 2, self.num_experts, dtype=torch.float64, device=device)
        for row, sums in zip(total, self.layers, strict=True):
            if sums.counts is not None and sums.probabilities is not None:
                row[0], row[1] = sums.counts, sums.probabilities
        return total

    def loss(self, total: Tensor) -> Tensor:
        """The loss, from the sums of all ranks. Its gradient is THIS rank's part of the routers' gradients."""
        num_tokens = total[:, 0].sum(-1, keepdim=True).clamp_min(1) / self.experts_per_token  # [layers, 1]
        fractions, means = (total[:, part] / num_tokens for part in (0, 1))
        scale = self.weight * self.num_experts / self.num_layers
        value = scale * (fractions * means).sum()
        # A term of value zero that has this gradient: so autograd accumulates it like all other gradients.
        carriers = []
        for layer, sums in enumerate(self.layers):
            if sums.products is None:
                continue
            wide = sums.products.dtype
            f = fractions[layer].to(wide)
            gradient = torch.einsum("ej,ejc->jc", f[None, :] - f[:, None], sums.products)
            gradient *= scale / num_tokens[layer].to(wide)
            carriers.append((sums.router.weight.to(wide) * gradient).sum())
        if not carriers:
            return value
        carrier = torch.stack(carriers).sum()
        return value + (carrier - carrier.detach())


class _LayerSums:
    """Sums over the tokens of one layer on this rank, since ``reset``.

    Attributes:
        counts, probabilities: ``[E]`` fp64, sums of choices and of the router's probabilities.
        products: ``[E, E, C]`` in fp32 or wider, the sum of ``p[e] p[j] h``. All three are None before the first token.
    """

    def __init__(self, router: nn.Module, experts_per_token: int) -> None:
        self.router: Any = router
        self.experts_per_token = experts_per_token
        self.reset()

    def reset(self) -> None:
        self.counts: Tensor | None = None
        self.probabilities: Tensor | None = None
        self.products: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Add tokens: the router's input ``[T, C]``."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        hidden = rows.to(wide)
        p = F.linear(hidden, self.router.weight.detach().to(wide)).softmax(dim=-1)
        num_experts = p.shape[1]
        chosen = p.topk(self.experts_per_token, dim=-1).indices
        if self.counts is None or self.probabilities is None or self.products is None:
            self.counts = p.new_zeros(num_experts, dtype=torch.float64)
            self.probabilities = torch.zeros_like(self.counts)
            self.products = p.new_zeros(num_experts, num_experts, hidden.shape[1])
        # ``bincount`` would wait for the GPU.
        self.counts += (chosen.reshape(-1, 1) == torch.arange(num_experts, device=chosen.device)).sum(0)
        self.probabilities += p.sum(0, dtype=torch.float64)
        pairs = (p[:, :, None] * p[:, None, :]).flatten(1)
        self.products.view(-1, hidden.shape[1]).addmm_(pairs.T, hidden)


def _is_plain(router: nn.Module, experts_per_token: int) -> bool:
    """Whether it chooses the experts with the largest products of a row and its only weight, and returns both.

    A bias for the choice, as DeepSeek-V3 has, is a buffer, zero at first.
    """
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or len([*router.parameters(), *router.buffers()]) > 1:
        return False
    if weight.is_meta:
        return True
    rows = torch.linspace(-1, 1, 64 * weight.shape[1], device=weight.device).sin().to(weight.dtype).view(64, -1)
    with torch.no_grad():
        logits = F.linear(rows, weight)
        own = logits.topk(experts_per_token).values
        try:
            theirs, *_, chosen = router(rows)
            largest = logits.gather(-1, chosen).sort(descending=True).values
            return bool(torch.allclose(theirs.to(logits), logits)) and torch.equal(largest, own)
        except (TypeError, ValueError, RuntimeError):  # it wants more than rows, or returns something else
            return False


def _refusal(name: str) -> Exception:
    return refusal(
        name,
        "it has no routers that choose the experts with the largest products of a row and one matrix of weights",
        so="the loss for even use of experts (model.router_aux_loss_weight) is not known for it",
        fix="set model.router_aux_loss_weight to 0: experts are then trained by cross-entropy alone",
    )


def _watch(decoder: HasRows, sums: _LayerSums, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    target = running_pass()
    if target is None or not torch.is_grad_enabled():
        return args
    rows = decoder.token_rows
    count = target.num_rows if rows is None else len(own_rows(target.num_rows, rows.shards.tp))
    return (_Count.apply(args[0], sums, count), *args[1:])


class _Count(torch.autograd.Function):
    """The rows themselves; their backward adds the first ``count`` to the sums of a layer. Others pad."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, sums: _LayerSums, count: int) -> Tensor:
        ctx.sums, ctx.count = sums, count
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (hidden,) = ctx.saved_tensors
        if ctx.count:
            ctx.sums.add(hidden.reshape(-1, hidden.shape[-1])[: ctx.count])
        return gradients[0], None, None
