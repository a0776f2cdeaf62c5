"""Ranks whose devices differ: what each may hold, how fast it is, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale.common.errors import ConfigError, PlanError
from bytescale.common.units import GIBI as GIB
from bytescale.config.schema import Config, MemoryConfig, ParallelConfig, PlannerConfig
from bytescale.cost.assumed import ASSUMED
from bytescale.cost.calibration import Calibrator, State
from bytescale.plan.io import load_plan
from bytescale.plan.slices import micro_batch_tokens
from bytescale.plan.verify import verify
from bytescale.planner.verified import VerifiedPlanner
from bytescale.runtime.mesh import MeshShape
from bytescale.train.parts import job as parts
from bytescale.train.parts.budget import MemoryBudget, memory_budget
from bytescale.train.parts.devices import Devices, RankDevice
from tests.cost.test_calibration import TRUE
from tests.train.runs import on_ranks, run, small_run, with_shape, write_corpus

LARGE = RankDevice(name="large", device_bytes=80.0, host_bytes=100.0, flops_per_second=9e14)
SMALL = RankDevice(name="small", device_bytes=40.0, host_bytes=100.0, flops_per_second=3e14)


def test_devices_that_hardly_differ_are_equal() -> None:
    ranks = [replace(LARGE, device_bytes=size) for size in (80.0, 79.0, 78.0, 40.0)]
    assert Devices.of_mesh(ranks, MeshShape(hdp=4)).device_bytes == (78.0, 78.0, 78.0, 40.0)
    assert Devices.of_mesh(ranks, MeshShape(hdp=4)).smallest == 3


def test_speeds_are_peak_rates_beside_the_profiled_device() -> None:
    devices = Devices(of_ranks=(LARGE, SMALL, SMALL))
    assert devices.speeds("large") == pytest.approx((1.0, 1 / 3, 1 / 3))
    assert devices.speeds() == pytest.approx((3.0, 1.0, 1.0))
    assert Devices(of_ranks=(LARGE, replace(SMALL, flops_per_second=None))).speeds() == (1.0, 1.0)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (MeshShape(hdp=2, tp=2), r"Ranks 2 and 3 are in one TP group .* large, .* small"),
        (MeshShape(hdp=2, pp=2), r"Ranks 1 and 3 are in one pipeline"),
    ],
)
def test_devices_that_act_together_have_to_be_equal(shape: MeshShape, message: str) -> None:
    large, small = (replace(device, name=device.name + ",") for device in (LARGE, SMALL))
    with pytest.raises(ConfigError, match=message):
        Devices.of_mesh([large, large, large, small], shape)
    pairs = [large, large, small, small] if shape.tp > 1 else [large, small, large, small]
    assert [device.name for device in Devices.of_mesh(pairs, shape).of_ranks] == ["large,", "small,"]


def auto_run(folder: Path, name: str) -> Config:
    config = on_ranks(small_run(write_corpus(folder / "corpus"), folder / name, steps=4), 3)
    parallel = replace(config.parallel, capacity_tokens=0)
    return replace(config, parallel=parallel, memory=MemoryConfig(offload="off"), planner=PlannerConfig())


def budget(config: Config, sizes: list[float], **changes: Any) -> MemoryBudget:
    import torch

    from tests.train.runs import described

    config = replace(config, **changes)
    spec, memory = described(config)
    devices = Devices(of_ranks=tuple(replace(SMALL, device_bytes=size) for size in sizes))
    cpu, times = torch.device("cpu"), ASSUMED["cpu"].profile(spec, bytes_per_element=4)
    return memory_budget(config, memory, device=cpu, devices=devices, profile=times)


def test_auto_capacity_is_what_each_rank_has_room_for(tmp_path: Path) -> None:
    config = auto_run(tmp_path, "run")
    sizes = [0.004 * GIB, 0.008 * GIB, 0.008 * GIB]
    found = budget(config, sizes)
    alone = [budget(config, [size] * 3).capacity_tokens for size in sizes]
    assert found.cluster.capacity_tokens.tolist() == alone
    assert alone[0] < alone[1]
    assert found.cluster.room == sum(alone)
    assert any("differ" in line for line in found.lines())
    naive = budget(config, sizes, planner=replace(config.planner, name="naive"))
    assert naive.cluster.capacity_tokens.tolist() == [alone[0]] * 3
    assert budget(config, sizes, parallel=ParallelConfig(ranks=3, capacity_tokens=100)).cluster.is_uniform


def test_memory_is_checked_for_each_rank(tmp_path: Path) -> None:
    config = auto_run(tmp_path, "run")
    sizes = [0.008 * GIB, 0.004 * GIB, 0.008 * GIB]
    found = budget(config, sizes)
    planner = VerifiedPlanner(
        config.planner, found.cluster, TRUE, found.limits, context_length=config.data.context_length
    )
    plan = planner([found.cluster.room - 10, 40, 50, 60])
    held = micro_batch_tokens(plan).held
    assert held.max() > found.capacity_tokens, "only a large rank holds so many"
    verify(plan, limits=found.limits)
    moved = replace(found.limits, device_bytes=(sizes[1], sizes[0], sizes[0]))
    with pytest.raises(PlanError, match=r"on the device of rank 0"):
        verify(plan, limits=moved)


def test_a_rank_without_room_is_named(tmp_path: Path) -> None:
    config = auto_run(tmp_path, "run")
    with pytest.raises(ConfigError, match=r"64 KiB that rank 1 may use.*Not one token would fit"):
        budget(config, [0.008 * GIB, 2.0**16, 0.008 * GIB])
    with pytest.raises(ConfigError, match=r"capacity_tokens = 4096 needs .* that rank 2 may use"):
        budget(config, [0.2 * GIB, 0.2 * GIB, 0.008 * GIB], parallel=ParallelConfig(ranks=3, capacity_tokens=4096))


def test_a_run_on_unequal_ranks_has_the_losses_of_equal_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of other memory and other speed: weights differ, the results do not."""
    equal = run(on_ranks(small_run(write_corpus(tmp_path / "corpus"), tmp_path / "equal", steps=4), 1))
    config = auto_run(tmp_path, "unequal")

    def own_device(config: Config, device: Any, dtype: Any, num_ranks: int) -> RankDevice:
        import torch.distributed as dist

        rank = dist.get_rank()
        size = (0.004, 0.008, 0.008)[rank] * GIB
        return RankDevice(name="cpu, float32", device_bytes=size, host_bytes=0.0, flops_per_second=(1, 2, 3)[rank])

    monkeypatch.setattr(parts, "rank_device", own_device)
    assert run(config) == pytest.approx(equal, rel=1e-4)
    plans = [load_plan(tmp_path / "unequal" / "plans" / f"step-{step:06d}.npz") for step in range(1, 5)]
    assert len(set(plans[0].capacity_tokens.tolist())) == 2
    work = [np.bincount(plan.micro_batch_ranks, micro_batch_tokens(plan).held, minlength=3) for plan in plans]
    assert np.sum(work, axis=0)[2] > 1.5 * np.sum(work, axis=0)[0]


def test_ranks_that_shall_offload_are_planned_as_equal_ones(tmp_path: Path) -> None:
    config = auto_run(tmp_path, "run")
    deep, sizes = with_shape(config, num_hidden_layers=6), [0.016 * GIB, 0.008 * GIB]
    assert not budget(deep, sizes).cluster.is_uniform
    found = budget(deep, sizes, memory=MemoryConfig(offload="on")).cluster
    assert found.is_uniform
    assert found.offload is not None


def test_calibration_starts_from_the_speeds_of_the_data_sheets() -> None:
    calibrator = Calibrator(first=TRUE, first_speeds=(1.0, 0.5))
    assert calibrator.speeds(State()).tolist() == [1.0, 0.5]
    measured = State(speeds=((1.0, 0.3),) * 3)
    assert calibrator.speeds(measured).tolist() != [1.0, 0.5]
