"""A thread that ends a rank's waiting for ranks that are gone, where the host waits for kernels (NCCL).

A kernel that waits for a dead rank never ends, and a host that waits for the kernel cannot raise. So this thread looks
for ranks that are gone, and aborts all communicators then: their kernels end, and the host goes on. What it reads then
is no result, so ``RankGroup.read`` asks whether communicators were aborted (docs/gpu.md, "Ranks that die").
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.distributed_c10d import _world

_LOOK_SECONDS = 0.2


class Watch:
    """Looks from time to time, until ``stop``, and calls ``abort`` once."""

    def __init__(self, has_lost: Callable[[], bool], abort: Callable[[], None]) -> None:
        self._has_lost, self._abort = has_lost, abort
        self._stopped, self._aborted = threading.Event(), threading.Event()
        self.has_aborted = self._aborted.is_set
        self._thread = threading.Thread(target=self._look, name="bytescale-watch", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            if self._has_lost():
                self._aborted.set()  # before a host goes on
                self._abort()
                return

    def stop(self) -> None:
        """Look no more. Behind it nothing is aborted."""
        self._stopped.set()
        self._thread.join()


def nccl_has_failed() -> bool:
    """Whether PyTorch's own watchdog has seen an error of NCCL or a time limit."""
    return any(backend.get_error().name != "SUCCESS" for backend in _nccl())


def abort_nccl() -> None:
    """End all operations of NCCL. PyTorch goes on to know the groups: the training thread may ask for them now."""
    backends = _nccl()
    backends[0]._group_start()  # one by one, they would wait for each other
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


def _nccl() -> list[Any]:
    """Of every group that has it."""
    known = list(_world.pg_backend_config.items())
    return [group._get_backend(torch.device("cuda")) for group, kinds in known if "cuda:nccl" in kinds]
