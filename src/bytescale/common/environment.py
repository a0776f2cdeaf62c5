"""Environment variables: those of torchrun, and those for child processes, which this process does not keep."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def ranks_of_torchrun() -> int | None:
    """How many ranks torchrun, or anything that speaks its variables, started in all; None when it started none."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the time of the block. Then they have the values that they had before, or none."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
