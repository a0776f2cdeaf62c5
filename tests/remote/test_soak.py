"""The soak of ``benchmarks/soak.py`` with few kills: the benchmark has 50."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.exhaustive
def test_a_small_soak() -> None:
    """A server, the launcher and a rank, at random moments; the soak itself counts every token and every process."""
    ended = subprocess.run(
        [sys.executable, str(SOAK), "--kills", "3", "--steps", "40", "--seed", "12", "--limit-seconds", "800"],
        capture_output=True,
        text=True,
        timeout=890,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "{'server': 1, 'launcher': 1, 'rank': 1} killed, 40 steps" in ended.stdout
    assert "0 lost, 0 doubled" in ended.stdout
