"""Rotary position embeddings, with the two ways in use of stretching them to longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bytescale.config import Architecture


def rope_frequencies(shape: Architecture, device: torch.device) -> Tensor:
    """``[D / 2]`` fp64 angular frequencies in radians per token.

    ``linear`` divides every frequency by the factor. ``llama3`` divides those whose wavelength exceeds the original
    context, leaves those four times shorter, and blends in between (Llama 3.1's low_freq_factor 1, high_freq_factor 4).
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


def rope_rotation(position_ids: Tensor, shape: Architecture, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[T, 1, D / 2]`` of each token's angles, fp32 (fp64 for an fp64 model).

    Angles are taken in fp64: at a position of 2M, fp32 is off by a tenth of a radian.
    """
    frequencies = rope_frequencies(shape, position_ids.device)
    angles = position_ids.to(torch.float64)[:, None, None] * frequencies
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return angles.cos().to(wide), angles.sin().to(wide)


def apply_rope(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs ``(x[i], x[i + D/2])`` of ``heads [T, H, D]`` (Hugging Face's pairing)."""
    cos, sin = rotation
    first, second = heads.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)
