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

Each operation is a plain function. Its forward, and its backward as PyTorch derives it (``torch.func.vjp``), are
compiled apart (``attention.row_compiler``), and one ``autograd.Function`` calls both. It keeps what the function is of
and nothing else, and backward computes again what lies between, in the same pass. So a layer keeps less memory than
without compilation. The plain model is the slow twin.

Shape letters: T tokens, C hidden size, F feed-forward width, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bytescale.attention.row_compiler import Function, RowCompiler
from bytescale.models.llama import AttentionCallable, FeedForward, Layer, Llama, swiglu
from bytescale.models.moe import Experts
from bytescale.models.rope import Rotation


def apply_compiled(model: Llama, compiler: RowCompiler, *, chunked: bool) -> None:
    """Replace the operations of ``model`` between matrix products by compiled functions.

    Args:
        model: the whole model or a stage, with or without tensor parallelism. It is changed in place.
        compiler: compiles the functions.
        chunked: whether the feed-forward parts, with their norms, will process their rows in chunks (checkpointing).
    """
    functions = _Functions(compiler, model.shape.norm_eps)
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

    def __init__(self, compiler: RowCompiler, eps: float) -> None:
        def norm(hidden: Tensor, weight: Tensor) -> Tensor:
            wide = _wide(hidden)
            scale = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
            return (wide * scale * _wide(weight)).to(hidden.dtype)

        def norm_beside(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return hidden, norm(hidden, weight)

        def add_norm(hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            total = hidden + update
            return norm_beside(total, weight)

        # Each backward is a function of its own: the compiler counts graphs by code, and gives up after eight.
        self.norm = _Operation(
            compiler.compile(norm), compiler.compile(lambda d, *inputs: torch.func.vjp(norm, *inputs)[1](d))
        )
        self.norm_beside = _Operation(
            compiler.compile(norm_beside),
            compiler.compile(lambda d_rows, d, *inputs: torch.func.vjp(norm_beside, *inputs)[1]((d_rows, d))),
        )
        self.add_norm = _Operation(compiler.compile(add_norm), self.norm_beside.backward, adds=True)
        self.swiglu = _Operation(
            compiler.compile(swiglu), compiler.compile(lambda d, *inputs: torch.func.vjp(swiglu, *inputs)[1](d))
        )
        self._rotate = compiler.compile(_rotate)

    def rotate(self, heads: Tensor, rotation: Rotation, out: Tensor) -> Tensor:
        """``rope.rotate``."""
        self._rotate(heads, *rotation, out)
        return out


@dataclass(frozen=True)
class _Operation:
    """A differentiable function of row tensors and weights, whose forward and backward are compiled."""

    forward: Function
    backward: Function
    """Of the gradients of all outputs and of what forward keeps: its inputs."""
    adds: bool = False
    """Whether forward begins with the sum of its first two inputs. It returns the sum, too, and keeps it instead."""

    def __call__(self, *inputs: Tensor) -> Any:
        return _Compiled.apply(self, *inputs)


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: _Operation, *inputs: Tensor) -> Any:
        outputs = operation.forward(*inputs)
        ctx.operation = operation
        ctx.save_for_backward(*((outputs[0], *inputs[2:]) if operation.adds else inputs))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.operation.backward(*gradients, *ctx.saved_tensors)
        return None, *((found[0], *found) if ctx.operation.adds else found)


def _compile_layer(layer: Layer, functions: _Functions, chunked: bool) -> None:
    first, second = layer.input_layernorm, layer.post_attention_layernorm

    def whole(hidden: Tensor, rotation: Rotation, attention: AttentionCallable) -> Tensor:
        hidden, normed = functions.norm_beside(hidden, first.weight)
        update = layer.self_attn(normed, rotation, attention)
        hidden, normed = functions.add_norm(hidden, update, second.weight)
        return hidden + layer.mlp(normed)

    def in_chunks(hidden: Tensor, rotation: Rotation, attention: AttentionCallable) -> Tensor:
        hidden, normed = functions.norm_beside(hidden, first.weight)
        hidden = hidden + layer.self_attn(normed, rotation, attention)
        return hidden + layer.feed_forward(hidden)

    layer.forward = in_chunks if chunked else whole  # type: ignore[method-assign]
    if chunked:
        _compile_norm(second, functions)


def _compile_norm(norm: nn.RMSNorm, functions: _Functions) -> None:
    norm.forward = lambda hidden: functions.norm(hidden, norm.weight)  # type: ignore[method-assign, assignment]


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    first, second = heads.to(cos.dtype).chunk(2, dim=-1)
    out.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
