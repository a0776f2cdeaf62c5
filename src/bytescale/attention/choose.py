"""Which kernel computes attention: by the name in the config, the device and dtype, and the rules of a call.

| rule | CPU | CUDA | math |
|---|---|---|---|
| none, scale | ATen's flash | flash (``flash``: which one) | products |
| window | flash where the window is not shorter than a sequence, else tiles | flash, ``window_size_left`` | products |
| soft cap | tiles | tiles, in fp32 | products |
| sinks | joined after the kernel (``sinks``) | the same | the same |
| V narrower or wider than K | the narrower one is padded with zeros | the same | as it is |

No flash operator of PyTorch takes a soft cap (torch 2.13).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bytescale.attention.kernels import AttentionKernel, CpuFlashKernel, CudaFlashKernel, MathKernel
from bytescale.attention.rules import AttentionRules
from bytescale.attention.tiled import TiledKernel
from bytescale.common.errors import ConfigError


def select_kernel(name: str, device: torch.device, dtype: torch.dtype) -> AttentionKernel:
    """Return the kernel for a device and dtype: the flash kernel for ``auto`` and ``flash``, the twin for ``math``.

    Raises ``ConfigError`` where flash attention does not exist. It never falls back to something slower.
    """
    if device.type not in ("cpu", "cuda", "meta"):
        raise ConfigError(f"there is no attention for {device.type} devices", fix="use a CUDA GPU, or the CPU")
    if name not in ("auto", "flash", "math"):
        raise ConfigError(f"there is no attention kernel {name!r}", fix="use auto, flash or math")
    if name == "math":
        return MathKernel()
    if device.type == "cpu":
        return CpuFlashKernel()
    if dtype in (torch.bfloat16, torch.float16):
        return CudaFlashKernel()
    raise ConfigError(
        f"there is no CUDA flash attention for {str(dtype).removeprefix('torch.')}",
        so="attention would need memory that grows with the square of the length",
        fix='set trainer.dtype = "bf16", or kernels.attention = "math" for short sequences',
    )


def kernel_for(kernel: AttentionKernel, rules: AttentionRules) -> AttentionKernel:
    """The kernel that computes a call with these rules in the place of ``kernel``, or ``kernel`` itself.

    Raises ``ConfigError`` where a kernel of somebody else does not say that it knows rules.
    """
    if rules.window is None and rules.soft_cap is None:
        return kernel
    if isinstance(kernel, MathKernel | TiledKernel):
        return replace(kernel, soft_cap=rules.soft_cap)
    if isinstance(kernel, CpuFlashKernel | CudaFlashKernel) and rules.soft_cap is not None:
        return TiledKernel(soft_cap=rules.soft_cap)
    if isinstance(kernel, CpuFlashKernel):
        return TiledKernel(plain=kernel)
    if isinstance(kernel, CudaFlashKernel):
        return kernel
    with_rules = getattr(kernel, "with_rules", None)
    if with_rules is None:
        raise ConfigError(
            f"{type(kernel).__name__} has no method with_rules, but a layer's attention has {rules}",
            so="the kernel would compute plain causal attention instead",
            fix="use select_kernel's kernels, or give it with_rules(rules), which returns a kernel that honours "
            "soft_cap, and the window of a BlockSet",
        )
    return with_rules(rules)
