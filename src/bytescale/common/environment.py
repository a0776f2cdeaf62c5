"""What torchrun tells a process in its environment."""

from __future__ import annotations

import os


def ranks_of_torchrun() -> int | None:
    """How many ranks torchrun, or anything that speaks its variables, started in all; None when it started none."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None
