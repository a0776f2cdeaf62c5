"""Whole runs with little memory: the same losses with offloading and recomputation, and clear errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale.common.errors import ConfigError
from bytescale.common.units import GIBI as GIB
from bytescale.config.schema import Config, MemoryConfig
from bytescale.config.validate import hdp_ranks
from bytescale.cost.assumed import ASSUMED
from bytescale.runtime.optimizer.copies import StatesCopy
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.train.loop.trainer import train
from bytescale.train.parts.budget import MemoryBudget, memory_budget, rank_device, usable_host_bytes
from bytescale.train.parts.devices import Devices
from tests.train.runs import described, on_ranks, run, small_run, with_shape, with_trainer, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


def deep_run(corpus: Path, run_dir: Path, num_ranks: int, capacity: int, **memory: object) -> Config:
    config = on_ranks(small_run(corpus, run_dir, steps=3), num_ranks, capacity)
    return replace(with_shape(config, num_hidden_layers=6), memory=MemoryConfig(**memory))  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_offloading_and_recomputation_give_the_same_losses(corpus: Path, tmp_path: Path) -> None:
    """With a capacity of 144, two ranks hold sequences of up to 256 tokens whole only by offloading."""
    plain = run(deep_run(corpus, tmp_path / "plain", 2, 256, offload="off"))
    offloaded = run(deep_run(corpus, tmp_path / "offload", 2, 144, offload="on", host_gib=0.25))
    assert offloaded == pytest.approx(plain, rel=1e-5)
    recomputed = deep_run(corpus, tmp_path / "both", 2, 144, offload="on", host_gib=0.25)
    assert run(with_trainer(recomputed, checkpointing="attention")) == pytest.approx(plain, rel=1e-5)


def test_a_single_rank_holds_more_than_its_capacity_by_offloading(corpus: Path, tmp_path: Path) -> None:
    plain = run(deep_run(corpus, tmp_path / "plain", 1, 256, offload="off"))
    offloaded = run(deep_run(corpus, tmp_path / "offload", 1, 160, offload="on", host_gib=0.25))
    assert offloaded == pytest.approx(plain, rel=1e-5)
    with pytest.raises(ConfigError, match=r"data.context_length = 256 exceeds 1 ranks .*memory.offload"):
        train(deep_run(corpus, tmp_path / "refused", 1, 160, offload="off"), print_line=lambda line: None)


def test_the_devices_that_train_say_whether_to_offload(corpus: Path, tmp_path: Path) -> None:
    """A model is also looked at on other devices: on the CPU for a cluster of GPUs, and a large one without memory."""
    moved = {}
    for offload, kind in (("auto", "cuda"), ("on", "cuda"), ("auto", "cpu")):
        config = deep_run(corpus, tmp_path / "run", 2, 144, offload=offload)
        moved[offload, kind] = described(config, kind=kind)[1].movable_bytes_per_token  # type: ignore[arg-type]
    assert moved["auto", "cuda"] == moved["on", "cuda"] > 0
    assert moved["auto", "cpu"] == 0


def test_offloading_that_would_free_nothing_is_refused(corpus: Path, tmp_path: Path) -> None:
    shallow = with_shape(deep_run(corpus, tmp_path / "run", 1, 256, offload="on"), num_hidden_layers=2)
    with pytest.raises(ConfigError, match="that frees no memory of this model of 2 layers"):
        budget(shallow)
    assert budget(replace(shallow, memory=MemoryConfig(offload="auto"))).cluster.offload is None


def budget(config: Config, **changes: object) -> MemoryBudget:
    device, dtype = torch.device("cpu"), torch.float32
    own = rank_device(config, device, dtype, config.parallel.ranks)
    alike = Devices.alike(own, hdp_ranks(config.parallel))
    spec, memory = described(config)
    times = ASSUMED["cpu"].profile(spec, bytes_per_element=4)
    options = {"device": device, "devices": alike, "profile": times, **changes}
    return memory_budget(config, memory, **options)  # type: ignore[arg-type]


def test_auto_capacity_fills_the_device(corpus: Path, tmp_path: Path) -> None:
    config = deep_run(corpus, tmp_path / "run", 2, 0, device_gib=0.05)
    chosen = budget(config)
    assert chosen.capacity_tokens == chosen.model.capacity_tokens(0.05 * GIB) > 256
    assert run(config) == pytest.approx(run(deep_run(corpus, tmp_path / "plain", 2, 256)), rel=1e-5)


@pytest.mark.parametrize(
    ("capacity", "memory", "message"),
    [
        (256, {"device_gib": 0.0005}, r"gradients and optimizer need .* of 524 KiB"),
        (
            2**20,
            {"device_gib": 0.01},
            r"micro-batch of parallel.capacity_tokens = 1048576 needs .* more than the 10.2 MiB",
        ),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_runs(
    corpus: Path, tmp_path: Path, capacity: int, memory: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        budget(deep_run(corpus, tmp_path / "run", 2, capacity, **memory))


def test_copies_of_states_take_host_memory(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two updates, a rank's own and another's: as many bytes as ranks really keep."""
    config, kept, update = deep_run(corpus, tmp_path / "run", 1, 256, offload="off"), [], ShardedOptimizer.update

    def kept_behind(optimizer: ShardedOptimizer, *arguments: Any, **options: Any) -> Any:
        result = update(optimizer, *arguments, **options)
        kept.append(len(StatesCopy.of(optimizer, None).content))
        return result

    monkeypatch.setattr(ShardedOptimizer, "update", kept_behind)
    train(config, print_line=lambda line: None)
    config = replace(config, parallel=replace(config.parallel, elastic=True))
    assert budget(config).model.states.host_bytes == pytest.approx(4 * kept[-1], rel=0.01)
    with pytest.raises(ConfigError, match="copied for others"):
        budget(replace(config, memory=MemoryConfig(host_gib=3 * kept[-1] / GIB)))


def test_ranks_share_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    config = Config()
    assert usable_host_bytes(config, 4) == pytest.approx(usable_host_bytes(config, 1) / 4)
