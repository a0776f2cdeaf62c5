"""Ranks as threads of the test process (``parity.thread_ranks``), with the groups of the runtime around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from bytescale.parity import thread_ranks as threads
from bytescale.runtime.group import RankGroup, gloo_group
from bytescale.runtime.mesh import Mesh, MeshShape

Result = TypeVar("Result")


def run_ranks(num_ranks: int, work: Callable[[RankGroup], Result], *, timeout_seconds: float = 300.0) -> list[Result]:
    """Run ``work`` once per rank, at the same time; its results in rank order. Any rank's error fails the test."""
    return threads.run_ranks(num_ranks, lambda group: work(RankGroup(group)), timeout_seconds=timeout_seconds)


def run_mesh(
    shape: MeshShape,
    work: Callable[[Mesh], Result],
    *,
    overlapped: bool = False,
    nodes: Sequence[int] | None = None,
    domain: int = 1,
    timeout_seconds: float = 300.0,
) -> list[Result]:
    """Run ``work`` once per rank of a mesh; its results in rank order."""
    store = dist.HashStore()

    def one_rank(world: RankGroup) -> Result:
        def make_group(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
            own = dist.PrefixStore(name, store)
            return gloo_group(own, list(ranks).index(world.rank), len(ranks), timeout_seconds)

        return work(Mesh.of(world, shape, make_group, overlapped=overlapped, nodes=nodes, domain=domain))

    return run_ranks(shape.size, one_rank, timeout_seconds=timeout_seconds)
