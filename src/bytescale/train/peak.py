"""Peak matrix-product rate of one rank's device: the denominator of MFU (model FLOP utilisation)."""

from __future__ import annotations

import torch

# Dense bf16 tensor-core rates in TFLOP/s, from NVIDIA's data sheets (half of the rates that these give with sparsity),
# by the whole name that CUDA gives the device: boards of one chip differ by a third.
_DATASHEET_BF16_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A800-SXM4-80GB": 312.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H800": 989.0,
    "NVIDIA H20": 148.0,
    "NVIDIA H200": 989.0,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA GH200 480GB": 989.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
}


def device_name(device: torch.device, dtype: torch.dtype) -> str:
    """Device and dtype as profiles name them: ``NVIDIA H200, bfloat16`` or ``cpu, float32``."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return f"{name}, {str(dtype).removeprefix('torch.')}"


def known_peak(device: torch.device, dtype: torch.dtype, configured_tflops: float | None) -> float | None:
    """FLOP/s of one rank's device, from ``trainer.peak_tflops`` or from the data sheet (bf16 on a listed GPU).

    None where neither knows it: the run then reports the FLOP/s that it reaches, and no MFU. A peak measured by timing
    matrix products at start was dropped. Cores that other work shares at that moment make it too low, and utilisation
    then came out at up to 129 % (docs/LOG.md).
    """
    if configured_tflops is not None:
        return configured_tflops * 1e12
    if device.type == "cuda" and dtype == torch.bfloat16:
        return datasheet_peak(torch.cuda.get_device_name(device))
    return None


def datasheet_peak(gpu_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by the name that CUDA gives it, or None for one that is not listed."""
    tflops = _DATASHEET_BF16_TFLOPS.get(gpu_name)
    return None if tflops is None else tflops * 1e12
