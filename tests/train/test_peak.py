"""The denominator of MFU comes from a data sheet, or is unknown."""

from __future__ import annotations

import pytest
import torch

from bytescale.train.profiling.peak import known_peak

CPU = torch.device("cpu")


def test_nothing_is_measured_where_nobody_knows_the_peak() -> None:
    assert known_peak(CPU, torch.float32) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 of a kind that came later", None),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_data_sheets(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert known_peak(torch.device("cuda"), torch.bfloat16) == peak
