"""The peak rate of a device for matrix products: the denominator of MFU (model FLOP utilisation)."""

from __future__ import annotations

import torch

# Dense bf16 tensor-core rates in TFLOP/s from NVIDIA's data sheets. Rates that a data sheet gives with sparsity are
# halved. The key is the whole name that CUDA reports, because boards with the same chip differ by up to a third.
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
    """Return the device and dtype as profiles write them, such as ``NVIDIA H200, bfloat16`` or ``cpu, float32``."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return f"{name}, {str(dtype).removeprefix('torch.')}"


def known_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of one device: the data sheet's for bf16 on a known GPU.

    None means that it is not known. It is not measured: other work on the cores makes it too low
    (docs/decisions/training.md).
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    tflops = _DATASHEET_BF16_TFLOPS.get(torch.cuda.get_device_name(device))
    return None if tflops is None else tflops * 1e12
