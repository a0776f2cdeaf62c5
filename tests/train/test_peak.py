"""The denominator of MFU."""

from __future__ import annotations

import itertools

import pytest
import torch

from bytescale.train import peak


def test_the_measured_rate_is_all_work_over_all_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share a core get it in turns: products take one second and three; one of two seconds never comes."""
    ticks = itertools.accumulate(itertools.chain([0.0, 0.0], itertools.cycle([1.0, 3.0])))
    monkeypatch.setattr(peak.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(peak, "_SECONDS", 40.0)
    monkeypatch.setattr(peak, "_SIDE", 8)
    rate = peak.peak_flops_per_second(torch.device("cpu"), torch.float32, None)
    assert rate == pytest.approx(2 * 8**3 / 2.0)


def test_a_configured_peak_is_taken_as_it_is() -> None:
    assert peak.peak_flops_per_second(torch.device("cpu"), torch.float32, 0.5) == 0.5e12
