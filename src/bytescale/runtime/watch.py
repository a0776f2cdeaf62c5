"""A thread that ends a rank's waiting for ranks that are gone, where the host waits for kernels (NCCL).

A kernel that waits for a dead rank never ends, and a host that waits for it cannot raise. So this thread aborts all
communicators: their kernels end, and the host goes on. What it reads then is no result, and ``RankGroup.read`` raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.distributed_c10d import _world

from bytescale.runtime.mesh import Mesh

_LOOK_SECONDS = 0.2


def watch(mesh: Mesh, is_lost: Callable[[], bool]) -> Callable[[], None]:
    """Abort NCCL as soon as a rank ``is_lost``, or NCCL has failed. Returns what ends the watch."""
    ended, aborted = threading.Event(), threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_SECONDS):
            if is_lost() or any(backend.get_error().name != "SUCCESS" for backend in _nccl()):
                aborted.set()  # before the host goes on
                abort_nccl()
                return

    def end() -> None:
        ended.set()
        thread.join()

    own = (mesh.world, mesh.hdp, mesh.node, mesh.gradients, mesh.domain, mesh.replicas, mesh.tp)
    for group in (*own, *mesh.forward, *mesh.backward):
        group.was_aborted = aborted.is_set
    thread = threading.Thread(target=look, name="bytescale-watch", daemon=True)
    thread.start()
    return end


def abort_nccl() -> None:
    """End all operations of NCCL. PyTorch still knows the groups: the training thread may ask for them meanwhile."""
    backends = _nccl()
    backends[0]._group_start()  # one by one, they would wait for each other
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


def _nccl() -> list[Any]:
    kinds = list(_world.pg_backend_config.items())
    return [group._get_backend(torch.device("cuda")) for group, kind in kinds if "cuda:nccl" in kind]
