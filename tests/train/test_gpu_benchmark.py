"""``benchmarks/gpu.py`` with cases of a second: its output, also when cases fail or time runs out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import gpu

SMALL = replace(
    gpu.CPU,
    offload=((1024, 5, "none", 0.0), (1024, 5, "none", 1.0)),
    mfu=((2, 64, 2, "none"),),
    longest=(("tiny", replace(gpu.TINY, num_layers=3), 1024),),
    loss=((64, 16, 128),),
    device_bytes=52 * 2**20,
    steps=1,
)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, only: str) -> tuple[int, dict[str, list[gpu.Row]]]:
    monkeypatch.setattr(gpu, "CPU", SMALL)
    monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "cpu", "--only", only, "--out", str(out)])
    code = gpu.main()
    return code, json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.exhaustive
def test_every_case_has_its_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, results = run(monkeypatch, tmp_path / "new" / "gpu.json", "loss,offload,mfu,longest")
    assert code == 0
    resident, moved = results["offload"]
    assert moved["peak_gib"] < 0.7 * resident["peak_gib"]
    for row in (resident, moved):
        assert row["estimated_gib"] == pytest.approx(row["peak_gib"], rel=0.1)
    losses = [row["loss"] for row in results["loss"] if "loss" in row]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)  # all do the same work
    assert len(losses) >= 2
    assert 0 < results["mfu"][0]["share"] < 2
    *tries, real = results["longest"]
    assert [row["attention"] for row in tries] == ["allocated, not computed"] * len(tries)
    assert real["attention"] == "computed"
    assert real["tokens"] == max(row["tokens"] for row in tries if row["fits"] == "yes")
    assert capsys.readouterr().out.count("\n| tiny | 3 |") == len(results["longest"])


def test_a_case_that_fails_says_why_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(error: Exception) -> gpu.Row:
        raise error

    def cases(device: gpu.Device, sizes: gpu.Sizes) -> Iterator[gpu.Case]:
        yield {"case": 1}, 0.0, lambda: fail(MemoryError("all 1 KiB are in use"))
        yield {"case": 2}, 0.0, lambda: fail(ValueError("what is this?\nmore"))
        yield {"case": 3}, 0.0, lambda: {"seconds": 1.0}

    monkeypatch.setitem(gpu.PARTS, "loss", cases)
    code, results = run(monkeypatch, tmp_path / "gpu.json", "loss")
    assert code == 1
    assert [row.get("note") for row in results["loss"]] == [
        "out of memory: all 1 KiB are in use",
        "failed: ValueError: what is this?",
        None,
    ]
    assert "| 3 | seconds 1 |" in capsys.readouterr().out


def test_on_a_gpu_what_would_not_end_in_time_is_left_out() -> None:
    device = gpu.Device("cpu")
    device.on_gpu = True
    row, is_right = gpu.measured(device, ({"tokens": 8}, 100.0, dict), seconds_left=60.0)
    assert row == {"tokens": 8, "note": "left out: takes about 100 s, 60 s are left"}
    assert is_right
