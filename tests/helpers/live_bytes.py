"""Counts the bytes of living tensors on a CPU, as a GPU's allocator does. Estimates of memory are compared with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bytescale.hf.model import counting

PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.addmm_.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
"""Operators that take nearly all of a training step's time, and whose results have sizes known beforehand."""


class LiveBytes(counting.LiveBytes):
    """The results of ``PRODUCTS`` are zeros of the right shape: memory does not depend on numbers.

    Processors without AVX-512 need minutes for BF16 products. With ``with_numbers`` they are computed.
    """

    def __init__(self, *, with_numbers: bool = False) -> None:
        super().__init__()
        self.with_numbers = with_numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        skipped = func in PRODUCTS and not self.with_numbers
        run = (lambda *given, **named: _zeros_of(func, given, named)) if skipped else func
        return super().__torch_dispatch__(run, types, args, kwargs)


def _zeros_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What ``func`` returns, with zeros in it: shapes by the operator's own rules, on meta tensors."""
    if func is torch.ops.aten.addmm_.default:
        return args[0]
    dtype = torch.bfloat16 if func is torch.ops.aten._grouped_mm.default else None  # its rules know no other dtype
    on_meta = tree_map_only(Tensor, lambda t: t.to("meta", dtype if t.is_floating_point() else None), (args, kwargs))
    result = func(*on_meta[0], **on_meta[1])
    return tree_map_only(
        Tensor,
        lambda t: torch.empty_strided(t.size(), t.stride(), dtype=args[0].dtype if dtype else t.dtype).zero_(),
        result,
    )
