"""RMSNorm that keeps its input alone for backward, in the place of a decoder's own (``weight * x / rms(x)``).

transformers' norms are a row of plain operations: in BF16 they keep a copy of every row in fp32 and one more in BF16,
a fifth of all that a Llama keeps. A class of norms is replaced where a small one of it gives the same numbers in fp32,
with random weights; all others stay. So do all norms of fp64 models, which compute in fp32 there.

Shape letters: C channels that are normalised.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def replace_norms(model: nn.Module) -> int:
    """Let those norms of ``model`` that may be replaced compute with ``RMSNorm``, in place. Returns their number."""
    known: dict[tuple[type[nn.Module], float], bool] = {}
    found = 0
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float) or not isinstance(weight, nn.Parameter):
            continue
        if len(inspect.signature(module.forward).parameters) > 1:  # a gate beside the rows
            continue
        kind = (type(module), eps)
        if weight.dim() != 1 or weight.dtype == torch.float64 or "forward" in vars(module):
            continue
        if not weight.numel():  # of another pipeline stage: no row could tell it from any other norm
            continue
        if kind not in known:
            known[kind] = _is_plain(module, eps)
        if known[kind]:
            module.forward = partial(_forward, module, eps)  # its weight may be replaced, too
            found += 1
    return found


def _forward(module: nn.Module, eps: float, hidden: Tensor) -> Tensor:
    result: Tensor = RMSNorm.apply(hidden, module.weight, eps)
    return result


class RMSNorm(torch.autograd.Function):
    """``hidden [..., C], weight [C] -> [..., C]``, with sums in fp32; keeps ``hidden`` and a number for each row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        if hidden.is_cuda:
            out, scale = torch.ops.aten._fused_rms_norm(hidden, [hidden.shape[-1]], weight, eps)
        else:
            wide = hidden.float()
            scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
            out = (wide * scale).mul_(weight).to(hidden.dtype)
        ctx.save_for_backward(hidden, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, scale = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:2])
        if hidden.is_cuda:
            d_hidden, d_weight = torch.ops.aten._fused_rms_norm_backward(
                gradients[0].contiguous(), hidden, [hidden.shape[-1]], scale, weight, needed
            )
            return d_hidden, d_weight, None
        normed, gradient = hidden.float() * scale, gradients[0].float()
        d_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype) if needed[1] else None
        if not needed[0]:
            return None, d_weight, None
        gradient = gradient * weight
        d_hidden = (gradient - normed * (gradient * normed).mean(-1, keepdim=True)).mul_(scale)
        return d_hidden.to(hidden.dtype), d_weight, None


def _is_plain(module: nn.Module, eps: float) -> bool:
    """Whether a norm of this class is ``RMSNorm``: tried on a copy with random weights, and rows of any size."""
    with torch.no_grad():
        random = torch.Generator().manual_seed(0)
        own = copy.deepcopy(module).float().to_empty(device="cpu")
        weight = own.get_parameter("weight").normal_(generator=random)
        rows = torch.randn(2, 3, len(weight), generator=random) * torch.tensor([[1e-3], [1.0], [30.0]])
        try:
            given = own(rows)
        except (TypeError, RuntimeError):
            return False
        expected = RMSNorm.apply(rows, weight, eps)
        return isinstance(given, Tensor) and torch.allclose(given, expected, rtol=1e-5, atol=1e-6)
