"""Peak matrix-product rate of one rank's device: the denominator of MFU (model FLOP utilisation)."""

from __future__ import annotations

import time

import torch

# Dense bf16 tensor-core rates in TFLOP/s from the vendors' data sheets, by a part of the device's name.
_DATASHEET_BF16_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "B200": 2250.0,
}
_SIDE = 768
_SECONDS = 0.3


def device_name(device: torch.device, dtype: torch.dtype) -> str:
    """Device and dtype as profiles name them: ``NVIDIA H200, bfloat16`` or ``cpu, float32``."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return f"{name}, {str(dtype).removeprefix('torch.')}"


def peak_flops_per_second(device: torch.device, dtype: torch.dtype, configured_tflops: float | None) -> float:
    """Floating-point operations per second: configured, from the data sheet (bf16 on a known GPU), or measured.

    The measurement is of matrix products one after the other, all of them over all their time: ranks which share cores
    and measure at the same moment so share the rate, though the one or the other product has a core to itself.
    """
    if configured_tflops is not None:
        return configured_tflops * 1e12
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, tflops in _DATASHEET_BF16_TFLOPS.items():
            if part in name:
                return tflops * 1e12
    return _measured(device, dtype)


def _measured(device: torch.device, dtype: torch.dtype) -> float:
    side = _SIDE if device.type == "cpu" else 8192
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    products, started, elapsed = -1, 0.0, 0.0  # the first one warms up
    while products < 3 or elapsed < _SECONDS:
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        products += 1
        if products == 0:
            started = time.perf_counter()
        elapsed = time.perf_counter() - started
    return products * 2 * side**3 / elapsed
