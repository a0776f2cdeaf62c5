"""What operators of PyTorch do on a GPU: which tensors they read and write, and for which ones the host waits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from bytescale.attention.blocks import BlockSet
from bytescale.attention.kernels import MathKernel, OfQueries

aten = torch.ops.aten

SHAPES_ALONE = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
"""Ends of the names of operators that look at a tensor's shape and not into it."""

HOST_WAITS = {
    *("_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "equal", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "linalg_eigh", "_linalg_eigh", "linalg_inv_ex"),
    *("_linalg_solve_ex", "linalg_cholesky_ex", "_linalg_svd"),
}
"""Operators that bring a number or a size from the GPU to the host, as PyTorch's CUDA kernels do it."""


@functools.cache
def writes(func: OpOverload) -> tuple[tuple[int, str, bool], ...]:
    """Every argument that an operator may be given: its place, its name, and whether it is written to."""
    return tuple(
        (place, argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for place, argument in enumerate(func._schema.arguments)
    )


@functools.cache
def looks_inside(func: OpOverload) -> bool:
    """Whether the operator reads the numbers of its inputs: it is no view, and makes not only a like shape."""
    name = func._schema.name.partition("::")[2]
    is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
    return not is_view and not name.endswith(SHAPES_ALONE) and name not in ("_unsafe_view", "set_", "resize_")


def arguments(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an operator is given, and whether it writes to each."""
    for place, name, is_written in writes(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        if isinstance(value, Tensor):
            yield value, is_written
        elif isinstance(value, list | tuple):
            yield from ((one, is_written) for one in value if isinstance(one, Tensor))


def host_waits(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> str:
    """Why the host waits for this operator on tensors of the device; empty: it does not."""
    name = func._schema.name.partition("::")[2]
    if name in HOST_WAITS:
        return name
    if name == "repeat_interleave" and len(args) == 1 and kwargs.get("output_size") is None:
        return "repeat_interleave without a size"
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        given = [index for index in args[1] if index is not None]
        masks = [index for index in given if index.dtype in (torch.bool, torch.uint8)]
        fills = name != "index" and len(given) == len(masks) == 1 and args[2].numel() == 1  # it is masked_fill then
        if masks and not fills:
            return f"{name} by a mask"
    return ""


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool,
    debug: bool, *, scale: float, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``aten._flash_attention_forward``, by the kernel of matrix products. LSE is ``[H, T]``, as on CUDA."""
    del max_q, max_k, window_size_right
    assert not debug
    assert dropout == 0.0
    out, lse = MathKernel().forward(q, k, v, _blocks(cu_q, cu_k, causal, window_size_left), scale)
    seed = torch.zeros(2, dtype=torch.uint64)
    return out, lse.T.contiguous(), seed, seed[:0], out.new_empty(0)


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
    max_k: int, dropout: float, causal: bool, seed: Tensor, unused: Tensor, *, scale: float,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``aten._flash_attention_backward``."""
    del max_q, max_k, seed, unused, window_size_right
    assert dropout == 0.0
    queries = OfQueries(dout, q, out, lse.T)
    return MathKernel().backward(queries, k, v, _blocks(cu_q, cu_k, causal, window_size_left), scale)


def grouped_product(
    a: Tensor, b: Tensor, offs: Tensor, bias: None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``aten._grouped_mm`` of rows ``[T, K]`` with ``[E, K, N]``, or of ``[M, T]`` with ``[T, N]``: ``[E, M, N]``.

    Expert e has the rows before ``offs[e]`` that no earlier one has.
    """
    assert bias is None
    assert out_dtype in (None, a.dtype)
    stops = offs.tolist()
    ranges = [slice(*pair) for pair in pairwise([0, *stops])]
    if b.dim() == 3:
        out = a.new_zeros(len(a), b.shape[2])
        for rows, matrix in zip(ranges, b, strict=True):
            out[rows] = a[rows] @ matrix
        return out
    return torch.stack([a[:, rows] @ b[rows] for rows in ranges])


def histogram(numbers: Tensor, bins: int, low: float, high: float) -> Tensor:
    """``aten.histc`` between bounds, for which the host does not wait; integers are counted, too, as on CUDA."""
    assert low < high, "the host would wait for the smallest and the largest number"
    return torch.histc(numbers.double(), bins, low, high).to(numbers.dtype)


def _blocks(cu_q: Tensor, cu_k: Tensor, causal: bool, window: int | None) -> BlockSet:
    ranges = [torch.stack([cu[:-1], cu[1:]], dim=1).numpy() for cu in (cu_q.long(), cu_k.long())]
    return BlockSet.of(*ranges, causal=causal, window=None if window is None or window < 0 else window + 1)


EMULATED = {
    aten._flash_attention_forward.default: flash_forward,
    aten._flash_attention_backward.default: flash_backward,
    aten.histc.default: histogram,
    aten._grouped_mm.default: grouped_product,  # whose CPU kernel knows no fp64
}
"""Operators without a CPU kernel, or without one for all dtypes."""
