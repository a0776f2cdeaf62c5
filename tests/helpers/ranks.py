"""Ranks as threads of the test process: real gloo messages over loopback, ready in milliseconds.

Each thread owns a gloo backend over one in-memory store. Autograd runs a thread's backward on that thread, so that the
runtime works exactly as in separate processes, collectives and point-to-point alike.
"""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from bytescale.runtime import Mesh, MeshShape, RankGroup

Result = TypeVar("Result")


def run_ranks(num_ranks: int, work: Callable[[RankGroup], Result], *, timeout_seconds: float = 300.0) -> list[Result]:
    """Run ``work`` once per rank, at the same time; its results in rank order. Any rank's error fails the test."""
    store = dist.HashStore()
    results: dict[int, Result] = {}
    errors: dict[int, str] = {}

    def one_rank(rank: int) -> None:
        try:
            results[rank] = work(RankGroup(_process_group(store, rank, num_ranks, timeout_seconds)))
        except BaseException:
            errors[rank] = traceback.format_exc()

    threads = [threading.Thread(target=one_rank, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_seconds)
    if errors:
        raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))
    gc.collect()  # groups that stand in reference cycles, before their store goes and before anybody forks
    hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not hung, f"ranks {hung} still run after {timeout_seconds} s"
    return [results[rank] for rank in range(num_ranks)]


def run_mesh(
    shape: MeshShape,
    work: Callable[[Mesh], Result],
    *,
    interleaved: bool = False,
    overlapped: bool = False,
    nodes: Sequence[int] | None = None,
    timeout_seconds: float = 300.0,
) -> list[Result]:
    """Run ``work`` once per rank of a mesh; its results in rank order."""
    store = dist.HashStore()

    def one_rank(world: RankGroup) -> Result:
        def make_group(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
            own = dist.PrefixStore(name, store)
            return _process_group(own, list(ranks).index(world.rank), len(ranks), timeout_seconds)

        return work(Mesh.of(world, shape, make_group, interleaved=interleaved, overlapped=overlapped, nodes=nodes))

    return run_ranks(shape.size, one_rank, timeout_seconds=timeout_seconds)


def _process_group(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> dist.ProcessGroup:
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timedelta(seconds=timeout_seconds))
    group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
