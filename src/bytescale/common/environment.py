"""What torchrun tells a process, what PyTorch is told, and the machine's memory. Does not need torch."""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

from bytescale.common.errors import ConfigError

_HOST_SHARE, _HOST_SHARE_WITH_OPTIMIZER = 0.5, 0.8
"""Of a machine's memory, for what its ranks offload: activations, and an optimizer too."""
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the second is the newer name of the first


def told(name: str, default: int, least: int = 0) -> int:
    """The number in an environment variable of torchrun's. Raises ``ConfigError`` for what is none."""
    text = os.environ.get(name, str(default))
    if text.isascii() and text.isdigit() and int(text) >= least:
        return int(text)
    raise ConfigError(f"the environment variable {name} is {text!r}", fix=f"unset it, or use a number from {least} on")


def ranks_of_torchrun() -> int | None:
    """How many ranks torchrun, or anything that speaks its variables, started in all; None when it started none."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    size, rank = told("WORLD_SIZE", 1, least=1), told("RANK", 0)
    if rank >= size:
        raise ConfigError(f"the environment variable RANK is {rank}, and WORLD_SIZE is {size}", fix="unset both")
    return size


def ranks_here(num_ranks: int) -> int:
    """How many of the ranks are on this machine: all, unless torchrun says otherwise."""
    return min(num_ranks, told("LOCAL_WORLD_SIZE", num_ranks, least=1))


def machine_bytes() -> float:
    """Memory of this machine, or of the container that limits it."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.exists() else "max"
    return min(total, math.inf if text == "max" else float(text))


def host_bytes_of_a_rank(num_ranks: int, *, with_optimizer: bool) -> float:
    """What each of the ranks on this machine may use for what is offloaded, and for copies of others' states."""
    return bytes_of_a_rank(_HOST_SHARE_WITH_OPTIMIZER if with_optimizer else _HOST_SHARE, num_ranks)


def bytes_of_a_rank(share: float, num_ranks: int) -> float:
    """What each of the ranks on this machine may use of its memory, if all of them together may use this share."""
    return share * machine_bytes() / ranks_here(num_ranks)


def prepare_gpu(environment: MutableMapping[str, str] = os.environ, *, deterministic: bool = False) -> None:
    """Set what CUDA's libraries read when they start, unless the user has. Called before torch is imported.

    - PyTorch's allocator grows its segments. Those of fixed size would be fragmented, because micro-batches have many
      different lengths, and because a buffer cannot be reused while a message still uses it.
    - NCCL does without sums inside of switches (NVLS), whose buffers take up to 1.6 GB for each communicator
      (NVIDIA/nccl#864), which the memory model does not count. Sums of gradients run beside the passes.
    - ``deterministic``: cuBLAS adds up in the same order in each run.
    """
    if not any(name in environment for name in _ALLOCATOR_VARIABLES):
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    if deterministic:
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
