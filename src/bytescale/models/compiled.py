"""The operations between a layer's matrix products, compiled, and applied to a plain model from outside.

========================  ==========================================  =============================================
                          forward, in one pass                        backward, in one pass
========================  ==========================================  =============================================
norm before attention     norm                                        its gradient + that of the residual stream
norm after attention      residual + attention's result, norm         the same
  with chunks of rows     norm                                        its gradient
rotation                  heads rotated, in fp32                      gradients rotated back
SwiGLU                    silu(gate) * up                             the gradients of gate and up
final norm                norm                                        its gradient
========================  ==========================================  =============================================

Each operation is an ``autograd.Function`` whose forward and backward are compiled functions
(``attention.row_compiler``). Forward saves exactly the tensors that its code names, so a layer keeps no more memory
than without compilation. SwiGLU keeps less, because silu(gate) is computed again in backward. The plain model is the
slow twin.

Shape letters: T tokens, C hidden size, F feed-forward width, H heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale.attention.row_compiler import RowCompiler
from bytescale.models.llama import AttentionCallable, FeedForward, Layer, Llama
from bytescale.models.moe import Experts
from bytescale.models.rope import Rotation


def apply_compiled(model: Llama, compiler: RowCompiler, *, chunked: bool) -> None:
    """Replace the operations of ``model`` between matrix products by compiled functions.

    Args:
        model: the whole model or a stage, with or without tensor parallelism. It is changed in place.
        compiler: compiles the functions.
        chunked: whether the feed-forward parts, with their norms, will process their rows in chunks (checkpointing).
    """
    functions = _Functions(compiler)
    for layer in model.layers:
        layer.self_attn.rotate = functions.rotate
        if isinstance(layer.mlp, FeedForward):
            layer.mlp.swiglu = functions.swiglu
        else:
            experts = layer.mlp.experts
            assert isinstance(experts, Experts), "a layer has a feed-forward block or a mixture of them"
            experts.swiglu = functions.swiglu
        _compile_layer(layer, functions, chunked)
    if model.norm is not None:
        _compile_norm(model.norm, functions)


class _Functions:
    """The compiled functions. Each is compiled once and serves all layers."""

    def __init__(self, compiler: RowCompiler) -> None:
        self.norm = compiler.compile(_norm)
        self.add_norm = compiler.compile(_add_norm)
        self.norm_backward = compiler.compile(_norm_backward)
        self.norm_and_residual_backward = compiler.compile(_norm_and_residual_backward)
        self.swiglu_forward = compiler.compile(_swiglu)
        self.swiglu_backward = compiler.compile(_swiglu_backward)
        self._rotate = compiler.compile(_rotate)

    def rotate(self, heads: Tensor, rotation: Rotation, out: Tensor) -> Tensor:
        """``rope.rotate``."""
        self._rotate(heads, *rotation, out)
        return out

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """``llama.swiglu``."""
        result: Tensor = _SwiGLU.apply(gate, up, self)
        return result


def _compile_layer(layer: Layer, functions: _Functions, chunked: bool) -> None:
    first, second = layer.input_layernorm, layer.post_attention_layernorm

    def whole(hidden: Tensor, rotation: Rotation, attention: AttentionCallable) -> Tensor:
        hidden, normed = _NormBeside.apply(hidden, None, first.weight, _eps(first), functions)
        update = layer.self_attn(normed, rotation, attention)
        hidden, normed = _NormBeside.apply(hidden, update, second.weight, _eps(second), functions)
        return hidden + layer.mlp(normed)

    def in_chunks(hidden: Tensor, rotation: Rotation, attention: AttentionCallable) -> Tensor:
        hidden, normed = _NormBeside.apply(hidden, None, first.weight, _eps(first), functions)
        hidden = hidden + layer.self_attn(normed, rotation, attention)
        return hidden + layer.feed_forward(hidden)

    layer.forward = in_chunks if chunked else whole  # type: ignore[method-assign]
    if chunked:
        _compile_norm(second, functions)


def _compile_norm(norm: nn.RMSNorm, functions: _Functions) -> None:
    def forward(hidden: Tensor) -> Tensor:
        result: Tensor = _Norm.apply(hidden, norm.weight, _eps(norm), functions)
        return result

    norm.forward = forward  # type: ignore[method-assign, assignment]


def _eps(norm: nn.RMSNorm) -> float:
    assert norm.eps is not None, "our norms are given theirs"
    return norm.eps


class _Norm(torch.autograd.Function):
    """``hidden [T, C]`` -> its norm."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float, functions: _Functions) -> Tensor:
        normed, scale = functions.norm(hidden, weight, eps)
        ctx.functions = functions
        ctx.save_for_backward(hidden, scale, weight)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_weight = ctx.functions.norm_backward(gradients[0], *ctx.saved_tensors)
        return d_hidden, d_weight, None, None


class _NormBeside(torch.autograd.Function):
    """``hidden`` (+ ``update``) and its norm. Both are outputs, because the residual stream continues past the norm."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float, functions: _Functions
    ) -> tuple[Tensor, Tensor]:
        if update is None:
            normed, scale = functions.norm(hidden, weight, eps)
            total = hidden.view_as(hidden)
        else:
            total, normed, scale = functions.add_norm(hidden, update, weight, eps)
        ctx.functions, ctx.added = functions, update is not None
        ctx.save_for_backward(total if ctx.added else hidden, scale, weight)
        return total, normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None, None]:
        d_total, d_normed = gradients
        d_hidden, d_weight = ctx.functions.norm_and_residual_backward(d_normed, *ctx.saved_tensors, d_total)
        return d_hidden, d_hidden if ctx.added else None, d_weight, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, functions: _Functions) -> Tensor:
        ctx.functions = functions
        ctx.save_for_backward(gate, up)
        result: Tensor = functions.swiglu_forward(gate, up)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        d_gate, d_up = ctx.functions.swiglu_backward(gradients[0], *ctx.saved_tensors)
        return d_gate, d_up, None


def _norm(hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm ``[T, C]``, and the scale of each row, ``[T, 1]`` in fp32 or wider."""
    wide = _wide(hidden)
    scale = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * _wide(weight)).to(hidden.dtype), scale


def _add_norm(hidden: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = hidden + update
    return total, *_norm(total, weight, eps)


def _norm_backward(d_normed: Tensor, hidden: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``hidden [T, C]`` and ``weight [C]``: with x = hidden * scale and g = d_normed * weight,
    ``scale * (g - x mean(g x))`` and ``sum over rows of d_normed * x``."""
    x = _wide(hidden) * scale
    g = _wide(d_normed) * _wide(weight)
    d_hidden = scale * (g - x * (g * x).mean(dim=-1, keepdim=True))
    return d_hidden.to(hidden.dtype), (_wide(d_normed) * x).sum(dim=0).to(weight.dtype)


def _norm_and_residual_backward(
    d_normed: Tensor, hidden: Tensor, scale: Tensor, weight: Tensor, d_total: Tensor
) -> tuple[Tensor, Tensor]:
    d_hidden, d_weight = _norm_backward(d_normed, hidden, scale, weight)
    return d_hidden + d_total, d_weight


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _swiglu_backward(d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    wide, d = _wide(gate), _wide(d_out)
    share = wide.sigmoid()
    d_gate = d * _wide(up) * share * (1 + wide * (1 - share))
    return d_gate.to(gate.dtype), (d * wide * share).to(up.dtype)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    first, second = heads.to(cos.dtype).chunk(2, dim=-1)
    out.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
