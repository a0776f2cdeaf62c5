"""Rotary position embeddings, and the two common ways to stretch them to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bytescale.config.architecture import Architecture

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of every token's angles, ``[T, 1, D / 2]``."""
Rotate = Callable[[Tensor, Rotation, Tensor], Tensor]
"""``(heads [T, H, D], rotation, out [T, H, D]) -> out``, outside of autograd: see ``rotate``."""
ROWS_AT_A_TIME = 2**15


def rope_frequencies(shape: Architecture, device: torch.device) -> Tensor:
    """``[D / 2]`` fp64 angular frequencies in radians per token.

    ``linear`` divides every frequency by the factor. ``llama3`` divides those whose wavelength exceeds the original
    context, keeps those whose wavelength is below a quarter of it, and blends in between (low_freq_factor 1 and
    high_freq_factor 4 of Llama 3.1).
    """
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float64, device=device) / shape.head_dim
    frequencies = shape.rope_theta**-exponent
    if shape.rope_scaling == "linear":
        return frequencies / shape.rope_scaling_factor
    if shape.rope_scaling == "llama3":
        wavelengths_per_context = shape.rope_original_context * frequencies / (2 * math.pi)
        kept = ((wavelengths_per_context - 1.0) / (4.0 - 1.0)).clamp(0.0, 1.0)
        return kept * frequencies + (1.0 - kept) * frequencies / shape.rope_scaling_factor
    return frequencies


def rope_rotation(position_ids: Tensor, shape: Architecture, dtype: torch.dtype) -> Rotation:
    """Cosine and sine ``[T, 1, D / 2]`` of each token's angles, fp32 (fp64 for an fp64 model).

    Angles are computed in fp64: at a position of 2M, fp32 is off by a tenth of a radian.
    """
    frequencies = rope_frequencies(shape, position_ids.device)
    angles = position_ids.to(torch.float64)[:, None, None] * frequencies
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return angles.cos().to(wide), angles.sin().to(wide)


def rotate(heads: Tensor, rotation: Rotation, out: Tensor) -> Tensor:
    """Rotate ``heads [T, H, D]`` into ``out``, outside of autograd. Rows are copied to fp32 a few at a time."""
    cos, sin = rotation
    pieces = (tensor.split(ROWS_AT_A_TIME) for tensor in (heads, cos, sin, out))
    for piece, piece_cos, piece_sin, place in zip(*pieces, strict=True):
        first, second = piece.to(cos.dtype).chunk(2, dim=-1)
        left, right = place.chunk(2, dim=-1)
        torch.sub(first * piece_cos, second * piece_sin, out=left)
        torch.add(second * piece_cos, first * piece_sin, out=right)
    return out


def rotate_back(gradient: Tensor, rotation: Rotation, out: Tensor, by: Rotate = rotate) -> Tensor:
    """Turn the gradient of rotated heads into that of the heads: rotate by the opposite angles, using ``by``."""
    cos, sin = rotation
    return by(gradient, (cos, -sin), out)


def apply_rope(heads: Tensor, rotation: Rotation, by: Rotate = rotate) -> Tensor:
    """Rotate the pairs ``(x[i], x[i + D/2])`` of ``heads [T, H, D]`` (Hugging Face's pairing)."""
    rotated: Tensor = _Rotate.apply(heads, *rotation, by)
    return rotated


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, by: Rotate) -> Tensor:
        ctx.by = by
        ctx.save_for_backward(cos, sin)
        return by(heads, (cos, sin), torch.empty_like(heads))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        d_heads = torch.empty_like(gradients[0])
        return rotate_back(gradients[0], ctx.saved_tensors, d_heads, ctx.by), None, None, None
