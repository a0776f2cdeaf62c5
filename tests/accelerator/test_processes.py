"""Processes with simulated accelerators, as ``make check-trl`` and ``make check-verl`` have them, without TRL and verl.

What their trainers ask of ``torch.distributed`` and of devices goes by other doors than the runtime's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.accelerator.answers import simulated
from tests.accelerator.device import Machine
from tests.accelerator.processes import BACKEND, simulated_process, told
from tests.helpers.forks import run_forked


def collectives(rank: int, device: torch.device) -> dict[str, Any]:
    """What two ranks get of each, in lists."""
    own = torch.arange(4.0, device=device) + 10 * rank
    first, second, whole = own.clone(), own.clone(), torch.empty(8, device=device)
    parts, objects = [torch.empty_like(own) for _ in range(2)], [None, None]
    dist.all_reduce(first)
    dist.broadcast(second, 1)
    dist.all_gather(parts, own)
    dist.all_gather_into_tensor(whole, own)
    found: dict[str, Any] = {"all_reduce": first, "broadcast": second, "all_gather": torch.cat(parts), "whole": whole}
    for name, call in (("reduce_scatter", dist.reduce_scatter_tensor), ("all_to_all", dist.all_to_all_single)):
        found[name] = torch.empty(2 if name == "reduce_scatter" else 4, device=device)
        call(found[name], own)
    found["messages"] = torch.empty(4, device=device)
    (dist.send if rank == 0 else dist.recv)(own if rank == 0 else found["messages"], 1 - rank)
    (dist.recv if rank == 0 else dist.send)(found["messages"] if rank == 0 else own, 1 - rank)
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    return {**{name: value.tolist() for name, value in found.items()}, "objects": objects}


def test_collectives_of_processes_are_those_of_gloo() -> None:
    def of_gloo(rank: int) -> dict[str, Any]:
        dist.init_process_group("gloo")
        return collectives(rank, torch.device("cpu"))

    def simulated_rank(rank: int) -> tuple[dict[str, Any], list[str]]:
        with simulated_process(rank) as own:
            dist.init_process_group(BACKEND)
            return collectives(rank, own.device), told(own)["faults"]

    wanted = run_forked(2, of_gloo)
    assert wanted[0]["whole"] == [0, 1, 2, 3, 10, 11, 12, 13]
    assert run_forked(2, simulated_rank) == [(own, []) for own in wanted]


def of_module(module: nn.Module) -> Tensor:
    return next(module.parameters())


NAMED: dict[str, Callable[[int], Tensor]] = {
    "module": lambda number: of_module(nn.Linear(2, 2).to(number)),
    "module by keyword": lambda number: of_module(nn.Linear(2, 2).to(device=number)),
    "module that is made there": lambda number: of_module(nn.Linear(2, 2, device=number)),
    "tensor": lambda number: torch.ones(2).to(number),
    "factory": lambda number: torch.ones(2, device=number),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_number_names_the_rank_s_accelerator(name: str) -> None:
    """Also where PyTorch, which has no accelerator, reads the number itself."""
    with simulated(), Machine(1).running() as own:
        assert NAMED[name](1).device == own.device
        with pytest.raises(AssertionError, match="the GPU of another rank"):
            NAMED[name](0)
