"""A platform of verl for machines without an accelerator: ranks on CPUs over gloo. ``run.py`` lets verl import it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*args: Any, **options: Any) -> None:
    """There is no device to set, wait for, profile or empty."""


def _zero(*args: Any, **options: Any) -> int:
    """There is no memory of a device."""
    return 0


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """CPUs. It is taken where ``VERL_PLATFORM`` names it, and never found by itself."""

    device_name = vendor_name = "cpu"
    device_module: Any = SimpleNamespace(  # torch.cpu with what verl asks torch.cuda for
        **vars(torch.cpu),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"), _zero),
        **dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "ipc_collect", "manual_seed"), _nothing),
        get_device_name=lambda *args: "CPU",
        mem_get_info=lambda *args: (0, 0),
    )
    set_device = synchronize = set_allocator_settings = empty_cache = staticmethod(_nothing)
    profiler_start = profiler_stop = staticmethod(_nothing)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        raise RuntimeError("a CPU has no CUDA runtime")
