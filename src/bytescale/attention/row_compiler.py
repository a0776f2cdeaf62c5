"""``torch.compile`` for functions whose tensors have one row per token, of which every micro-batch has another number.

What is compiled are plain functions without autograd: each is called from the forward or the backward of an
``autograd.Function`` that saves by itself what it needs. So attention, messages, hooks of tensor parallelism,
checkpointing and offloading stay outside of every graph, and see what they see without compilation.

One graph serves every length: the first dimension is a symbol to the compiler. Lengths 0 and 1, which it treats apart,
run the function as it is written; that is the slow twin.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from bytescale.attention.blocks import BlockSet, Rows
from bytescale.attention.kernels import AttentionKernel, OfQueries, merge_rows
from bytescale.common.errors import ConfigError

Function = Callable[..., Any]
Backend = Literal["inductor"] | Callable[..., Any]

_FIRST_COMPILED = 2


class RowCompiler:
    """Compiles functions of row tensors, and calls them so that one graph serves all lengths."""

    def __init__(self, backend: Backend = "inductor") -> None:
        """``backend``: of ``torch.compile``; tests count what another one is given."""
        self._backend = backend

    def compile(self, function: Function) -> Function:
        """``function`` of tensors and numbers, compiled at its first call for each dtype and width.

        Tensors with as many rows as the first are row tensors. Outputs and tensors written to are the function's own
        business; autograd sees nothing. The compiler's errors are raised as they are, none is hidden by a fallback.
        """

        @functools.cache
        def compiled(device_type: str) -> Function:
            options = _inductor_options(device_type) if self._backend == "inductor" else None
            return torch.compile(function, fullgraph=True, dynamic=False, backend=self._backend, options=options)

        def call(*arguments: Any) -> Any:
            rows = arguments[0].shape[0]
            plain = [argument.detach() if isinstance(argument, Tensor) else argument for argument in arguments]
            with torch.no_grad():
                if rows < _FIRST_COMPILED:
                    return function(*plain)
                for argument in plain:
                    if isinstance(argument, Tensor) and argument.dim() > 1 and argument.shape[0] == rows:
                        torch._dynamo.mark_dynamic(argument, 0)
                return compiled(arguments[0].device.type)(*plain)

        return call

    def check(self, device: torch.device) -> None:
        """Compile and run a line of code. Raises ``ConfigError`` where that is impossible."""
        needed = "Triton and a C compiler" if device.type == "cuda" else "a C++ compiler (g++)"
        try:
            self.compile(_twice)(torch.ones(_FIRST_COMPILED, 8, device=device))
        except Exception as failure:  # whatever the compiler, its subprocess or the loader raises
            inner = getattr(failure, "inner_exception", failure)  # torch.compile wraps what its backend raises
            cause = f"{type(inner).__name__}: {next(filter(str.strip, str(inner).splitlines()), '').strip()}"
            raise ConfigError(
                f"kernels.compile is on, but torch.compile fails here ({cause})",
                so="nothing could be compiled",
                fix=f"install {needed}, or leave kernels.compile out",
            ) from failure


class CompiledMerges:
    """An attention kernel whose partial results are merged by one compiled function: see ``kernels.merge_rows``."""

    def __init__(self, kernel: AttentionKernel, compiler: RowCompiler) -> None:
        self.kernel = kernel
        self._merge = compiler.compile(_merge)

    def around(self, kernel: AttentionKernel) -> CompiledMerges:
        """The same compiled function for the partial results of another kernel."""
        other = copy.copy(self)
        other.kernel = kernel
        return other

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockSet, scale: float) -> tuple[Tensor, Tensor]:
        """The kernel's own."""
        return self.kernel.forward(q, k, v, blocks, scale)

    def backward(
        self, queries: OfQueries, k: Tensor, v: Tensor, blocks: BlockSet, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The kernel's own."""
        return self.kernel.backward(queries, k, v, blocks, scale)

    def merge_rows(self, out: Tensor, lse: Tensor, rows: Rows, part_out: Tensor, part_lse: Tensor) -> None:
        """The same as ``kernels.merge_rows``."""
        # CUDA's kernels give LSE as a transposed [H, T]: strides that change with every length, to each of which the
        # compiler would give a graph of its own. A contiguous copy costs 1 / D of what the outputs do.
        picked_out, picked_lse = out[rows], lse[rows].contiguous()
        self._merge(picked_out, picked_lse, part_out, part_lse.contiguous())
        if not isinstance(rows, slice):
            out[rows] = picked_out
        lse[rows] = picked_lse


def _inductor_options(device_type: str) -> dict[str, Any]:
    # "deterministic" keeps the compiler from timing variants on the device: their sums differ in the last bits, and
    # ranks would disagree about which is fastest.
    options: dict[str, Any] = {"deterministic": True}
    if device_type == "cpu":
        from torch._inductor.cpu_vec_isa import pick_vec_isa  # takes a second

        # The compiler would choose the same width, but leaves its choice out of the key of its cache on disk (2.13).
        # Code for AVX2 found there and built for AVX-512 gives wrong numbers or ends the process. Settings are in the
        # key.
        options["cpp.simdlen"] = pick_vec_isa().bit_width()
    return options


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    merge_rows(out, lse, slice(None), part_out, part_lse)


def _twice(rows: Tensor) -> Tensor:
    return rows + rows
