"""bytescale as an engine of verl, by verl's entry point for plug-ins: importing this package registers a CPU platform.

A config says ``strategy: bytescale`` and names ``bytescale.integrations.verl.BytescaleEngineConfig``, which registers
the engine: verl imports its plug-ins while it is imported itself, when its engines cannot be (docs/other_trainers.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bytescale.integrations.verl import platform

if TYPE_CHECKING:
    from bytescale.integrations.verl.engine import BytescaleEngineConfig

__all__ = ["BytescaleEngineConfig", "platform"]


def __getattr__(name: str) -> Any:
    if name != "BytescaleEngineConfig":
        raise AttributeError(f"module 'bytescale.integrations.verl' has no attribute {name!r}")
    from bytescale.integrations.verl.engine import BytescaleEngineConfig

    return BytescaleEngineConfig
