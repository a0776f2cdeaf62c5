"""Which widths of heads a kernel has. Flash attention on GPUs ends at 256; everything else takes any width."""

from __future__ import annotations

from bytescale.hf.model.probe import ModelFacts
from bytescale.hf.model.refusal import refusal

WIDEST_FLASH_HEAD = 256
"""Of FlashAttention 2, 3 and 4, and of PyTorch's own."""


def check_widths(facts: ModelFacts, *, cuda_flash: bool) -> None:
    """Raise ``ConfigError`` for a layer whose heads the kernel does not have.

    ``cuda_flash``: whether flash attention computes on a GPU. Layers with a soft cap have a kernel of their own.
    """
    for layer in facts.layers if cuda_flash else ():
        width = max(layer.head_dim, layer.value_dim)
        if width > WIDEST_FLASH_HEAD and layer.rules.soft_cap is None:
            raise refusal(
                layer.name,
                f"its heads are {width} wide, and flash attention on a GPU ends at {WIDEST_FLASH_HEAD}",
                so="its first pass would fail",
                fix='use the math kernel for short documents (HDP(kernel="math"), kernels.attention = "math")',
            )
