"""A process as a rank with a simulated accelerator, under other people's trainers: ``torch.distributed``'s groups, too.

Their groups come from a backend "simulated", whose messages gloo moves and whose order NCCL's rules give. accelerate,
transformers and verl ask ``torch.cuda`` for a few things more than the runtime does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from bytescale.attention.kernels import CudaFlashKernel
from bytescale.hf.loop import micro_batch
from bytescale.runtime import group as runtime_group
from tests.accelerator.device import Machine, here
from tests.accelerator.groups import simulated_groups
from tests.accelerator.loops import micro_batches_are_parts, waits_amid

BACKEND = "simulated"


def _nothing(*args: Any, **options: Any) -> None:
    """There is no device to set, wait for, profile or empty."""


def _zero(*args: Any, **options: Any) -> int:
    """No memory of a device is counted."""
    return 0


def _communicator(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    assert here() is not None, "the group is made by the host of a simulated accelerator"
    # ``simulated_groups`` has put a communicator around it.
    return runtime_group.gloo_group(store, rank, size, timeout.total_seconds())


@contextmanager
def simulated_process(rank: int) -> Iterator[Machine]:
    """This process has one accelerator, number ``rank``; waits are counted amid micro-batches of ``HDP``."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _communicator, devices=["cpu", "cuda"])
    more = {
        **dict.fromkeys(("set_device", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "init"), _nothing),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), _nothing),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"), _zero),
        "is_available": lambda: here() is not None,
        "is_initialized": lambda: False,
        "is_bf16_supported": lambda *_: True,
        "device_count": lambda: dist.get_world_size() if dist.is_initialized() else 1,
        "get_device_name": lambda *_: "simulated",
    }
    of_any = {"current_stream": lambda *_: torch.cuda.current_stream(), "current_device_index": lambda: rank}
    with ExitStack() as entered:
        entered.enter_context(simulated_groups())
        entered.enter_context(mock.patch.multiple(torch.accelerator, **of_any))
        entered.enter_context(mock.patch.multiple(torch.cuda, **more))
        entered.enter_context(mock.patch.object(micro_batch, "select_kernel", return_value=CudaFlashKernel()))
        # NCCL's groups take tensors of the device alone, also for objects.
        entered.enter_context(mock.patch.object(c10d, "_get_object_coll_device", return_value=f"cuda:{rank}"))
        entered.enter_context(micro_batches_are_parts())
        yield entered.enter_context(Machine(rank).running())


def told(own: Machine) -> dict[str, Any]:
    """What a process is asked in the end: its faults, what its host waited for amid micro-batches, how many of them it
    ran, and how many waits there were beside them."""
    return {
        "faults": [f"{fault.kind}: {fault.what} ({fault.where})" for fault in own.faults],
        "waits": dict(waits_amid(own)),
        "micro_batches": own.num_micro_batches,
        "beside": len(own.waits) - sum(waits_amid(own).values()),
    }
