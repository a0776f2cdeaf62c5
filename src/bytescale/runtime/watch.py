"""A thread that looks whether other ranks are gone, while its rank computes or waits for them.

A kernel of NCCL that waits for a dead rank never ends, and a host that waits for it cannot raise. So this thread aborts
all communicators: their kernels end, and the host goes on. What it reads then is no result, and ``group.answered``
raises. From then on the thread tells the others that its rank lives, which may compute for minutes before it notices.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.distributed_c10d import _world

from bytescale.runtime.group import ABORTED

_LOOK_SECONDS = 0.2


def watch(is_lost: Callable[[], bool], tell_life: Callable[[], object], pause: float = 0.0) -> Callable[[], None]:
    """Abort NCCL as soon as a rank ``is_lost``, or NCCL has failed, and ``tell_life``. Returns what ends the watch.

    ``pause``: least seconds between two looks.
    """
    ended, pause = threading.Event(), max(pause, _LOOK_SECONDS)

    def look() -> None:
        while not ended.wait(pause):
            if is_lost() or any(backend.get_error().name != "SUCCESS" for backend in _nccl()):
                if _nccl():
                    ABORTED.set()  # before the host goes on
                    abort_nccl()
                while not ended.wait(pause):
                    tell_life()
                return

    def end() -> None:
        ended.set()
        thread.join()
        ABORTED.clear()
        atexit.unregister(end)

    thread = threading.Thread(target=look, name="bytescale-watch", daemon=True)
    thread.start()
    atexit.register(end)  # a thread inside of a store must not outlive the interpreter
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
