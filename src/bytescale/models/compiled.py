"""``torch.compile`` for norms, rotations and SwiGLU, applied to a plain model from outside (``kernels.compile``).

What is compiled are plain functions without autograd: the forward of each, and its backward as PyTorch derives it
(``torch.func.vjp``). One ``autograd.Function`` calls both and keeps the function's inputs alone. So attention, hooks,
messages, checkpointing and offloading stay outside of every graph. The plain model is the slow twin.

One graph serves every number of rows. Lengths 0 and 1, which the compiler treats apart, run the function as written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bytescale.common.errors import ConfigError
from bytescale.models.llama import FeedForward, Llama, swiglu
from bytescale.models.rope import Rotation

Function = Callable[..., Any]
_FIRST_COMPILED = 2


class RowCompiler:
    """Compiles functions of row tensors, and calls them so that one graph serves all lengths."""

    def __init__(self, backend: Literal["inductor"] | Function = "inductor") -> None:
        """``backend``: of ``torch.compile``; tests count what another one is given."""
        self._backend = backend

    def compile(self, function: Function) -> Function:
        """``function`` of tensors, compiled at its first call for each dtype and width.

        Tensors with as many rows as the first are row tensors. Autograd sees nothing. The compiler's errors are raised
        as they are, none is hidden by a fallback.
        """

        @functools.cache
        def compiled(device_type: str) -> Function:
            options = _inductor_options(device_type) if self._backend == "inductor" else None
            return torch.compile(function, fullgraph=True, dynamic=False, backend=self._backend, options=options)

        def call(*arguments: Tensor) -> Any:
            rows, plain = arguments[0].shape[0], [argument.detach() for argument in arguments]
            with torch.no_grad():
                if rows < _FIRST_COMPILED:
                    return function(*plain)
                for argument in plain:
                    if argument.dim() > 1 and argument.shape[0] == rows:
                        torch._dynamo.mark_dynamic(argument, 0)
                return compiled(arguments[0].device.type)(*plain)

        return call

    def check(self, device: torch.device) -> None:
        """Compile and run a line of code. Raises ``ConfigError`` where that is impossible."""
        needed = "Triton and a C compiler" if device.type == "cuda" else "a C++ compiler (g++)"
        try:
            self.compile(lambda rows: rows + rows)(torch.ones(_FIRST_COMPILED, 8, device=device))
        except Exception as failure:  # whatever the compiler, its subprocess or the loader raises
            inner = getattr(failure, "inner_exception", failure)  # torch.compile wraps what its backend raises
            cause = f"{type(inner).__name__}: {next(filter(str.strip, str(inner).splitlines()), '').strip()}"
            raise ConfigError(
                f"kernels.compile is on, but torch.compile fails here ({cause})",
                so="nothing could be compiled",
                fix=f"install {needed}, or leave kernels.compile out",
            ) from failure


def apply_compiled(model: Llama, compiler: RowCompiler) -> None:
    """Replace norms, rotations and SwiGLU of ``model`` by compiled functions, each of which serves all layers.

    ``model`` is the whole model or a stage, with or without tensor parallelism. It is changed in place.
    """
    eps = model.shape.norm_eps

    def norm(hidden: Tensor, weight: Tensor) -> Tensor:
        rows, scale = _wide(hidden), _wide(weight)
        return (rows * (rows.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * scale).to(hidden.dtype)

    # Each backward is a function of its own: the compiler counts graphs by code, and gives up after eight.
    norm_halves = compiler.compile(norm), compiler.compile(lambda d, *inputs: torch.func.vjp(norm, *inputs)[1](d))
    swiglu_halves = compiler.compile(swiglu), compiler.compile(lambda d, *inputs: torch.func.vjp(swiglu, *inputs)[1](d))
    rotate = compiler.compile(_rotate)

    def rotated(heads: Tensor, rotation: Rotation, out: Tensor) -> Tensor:
        rotate(heads, *rotation, out)
        return out

    for layer in model.layers:
        layer.self_attn.rotate = rotated
        block: Any = layer.mlp if isinstance(layer.mlp, FeedForward) else layer.mlp.experts
        block.swiglu = functools.partial(_Compiled.apply, swiglu_halves)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = functools.partial(_normed, norm_halves, module)  # type: ignore[method-assign]


def _normed(halves: tuple[Function, Function], module: nn.RMSNorm, hidden: Tensor) -> Tensor:
    result: Tensor = _Compiled.apply(halves, hidden, module.weight)
    return result


class _Compiled(torch.autograd.Function):
    """A function of row tensors and weights with one result, whose ``halves``, forward and backward, are compiled."""

    @staticmethod
    def forward(ctx: Any, halves: tuple[Function, Function], *inputs: Tensor) -> Any:
        ctx.run_backward = halves[1]
        ctx.save_for_backward(*inputs)
        return halves[0](*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.run_backward(*gradients, *ctx.saved_tensors)


def _inductor_options(device_type: str) -> dict[str, Any]:
    # "deterministic" keeps the compiler from timing variants on the device: their sums differ in the last bits, and
    # ranks would disagree about which is fastest.
    options: dict[str, Any] = {"deterministic": True}
    if device_type == "cpu":
        from torch._inductor.cpu_vec_isa import pick_vec_isa  # takes a second

        # The compiler would choose the same width, but leaves its choice out of the key of its cache on disk (2.13).
        # Code for AVX2 found there and built for AVX-512 gives wrong numbers or ends the process. Settings are in it.
        options["cpp.simdlen"] = pick_vec_isa().bit_width()
    return options


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    first, second = heads.to(cos.dtype).chunk(2, dim=-1)
    out.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
