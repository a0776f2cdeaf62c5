"""Layer 7: the trainer, its run folder and its metrics.

``train`` is imported when it is first used: the run folder's paths are also read where torch is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bytescale.train.loop.trainer import train

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    if name != "train":
        raise AttributeError(f"module 'bytescale.train' has no attribute {name!r}")
    from bytescale.train.loop.trainer import train

    return train
