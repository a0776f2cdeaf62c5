"""FlashAttention 4 with the results that PyTorch's registry unpacks.

torch 2.11 to 2.13 expect ``out, lse`` of forward and ``dq, dk, dv`` of backward. flash-attn-4 4.0.0b36 returns three
more values from forward, which are None without its options for sparse attention. Imported by PyTorch when the
implementation is activated, hence only where the package is installed.
"""

from __future__ import annotations

from typing import Any

from flash_attn.cute import interface
from torch import Tensor


def _flash_attn_fwd(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse, *_ = interface._flash_attn_fwd(*args, **options)
    return out, lse


def _flash_attn_bwd(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv, *_ = interface._flash_attn_bwd(*args, **options)
    return dq, dk, dv
