"""A loop of one's own and a run on the same ranks reckon with the same times, and with the same nodes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import bytescale
from bytescale.config.schema import Config, DataConfig, MemoryConfig, ParallelConfig
from bytescale.cost.model import CostModel
from bytescale.cost.offload_rule import OffloadRule
from bytescale.runtime import mesh
from bytescale.train.parts.devices import Devices, RankDevice
from bytescale.train.parts.job import plan_of_run

from .support import on_ranks, small_model

RANKS, ROOM = 4, 2.0**30


@pytest.mark.parametrize(
    "options",
    [{"tp": 2}, {"pp": 2, "checkpointing": "full"}, {"shard": "parameters", "domain": 2, "checkpointing": "attention"}],
    ids=str,
)
def test_a_loop_and_a_run_on_one_mesh_have_the_same_costs(options: dict[str, Any]) -> None:
    """Also for what offloading hides behind."""
    room = {"host_gib": 0.25, "device_gib": 1.0}
    parallel = {name: value for name, value in options.items() if name != "checkpointing"}
    checkpointing = options.get("checkpointing", "none")
    config = Config(
        parallel=ParallelConfig(ranks=RANKS, capacity_tokens=64, **parallel),
        memory=MemoryConfig(offload="on", checkpointing=checkpointing, **room),
        data=DataConfig(context_length=64),
    )

    def costs(group: Any, model: nn.Module) -> list[tuple[CostModel, OffloadRule | None]]:
        hdp = bytescale.HDP(model, group, capacity_tokens=64, **options, **room)
        device = RankDevice(name="any", device_bytes=ROOM, host_bytes=ROOM / 4)
        planning = plan_of_run(
            config, hdp.engine.decoder.spec, hdp.engine.measured_memory(), Devices.alike(device, hdp.mesh.hdp.size),
            device=torch.device("cpu"), dtype=torch.float32, ranks_per_node=RANKS // hdp.mesh.tp.size,
        )  # fmt: skip
        return [(one.cost, one.cluster.offload) for one in (hdp.planner, planning.planner)]

    model = small_model("qwen3", dtype=torch.float32, num_hidden_layers=8)
    for (cost, offload), (of_run, offload_of_run) in on_ranks(RANKS, model, costs):
        assert cost == of_run
        assert offload == offload_of_run is not None


def test_ranks_of_unequal_nodes_agree_on_the_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks on one node and one on another: none waits for a domain that others do not make."""
    own = threading.local()
    monkeypatch.setattr(mesh, "ranks_here", lambda num_ranks: own.node)

    def domain(group: Any, model: nn.Module) -> tuple[int, int]:
        own.node = 3 if group.rank() < 3 else 1
        hdp = bytescale.HDP(model, group, capacity_tokens=64, shard="parameters")
        return hdp.mesh.domain.size, hdp.cost.ranks_per_node

    assert on_ranks(RANKS, small_model("llama"), domain) == [(1, 1)] * RANKS
