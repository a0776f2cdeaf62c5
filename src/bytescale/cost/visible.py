"""The time of a shared group's messages that its attention does not hide: one formula, for planner and simulator.

A group of P rows and Q columns (``attention.rings.grid``) computes P Q blocks of ``c`` seconds on each member.
Meanwhile, one after the other, Q - 1 messages of queries arrive along the row, and P - 1 messages of keys around the
column. At last Q - 1 results go home. A message travels while a member computes the blocks that the message before has
made ready::

    queries there, y    Q - 1 messages, each beside one block
    keys, x             P - 1 messages; the first beside one block, each other beside the Q blocks of the one before
    results home, z     Q - 1 messages, each beside one block

    visible = (Q - 1) max(0, y - c) + max(0, x - c) + (P - 2) max(0, x - Q c) + (Q - 1) max(0, z - c)

A ring is the case Q = 1. Forward and backward each have times of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def visible_seconds(
    rows: Any, columns: Any, block: Any, keys: Any, there: Any, home: Any, maximum: Callable[[Any, Any], Any] = max
) -> Any:
    """Seconds of the messages of one pass that no block hides, by the formula above: P, Q; c, x, y, z in seconds.

    All arguments are numbers or, with ``np.maximum`` as ``maximum``, arrays that broadcast.
    """
    around = (rows > 1) * maximum(keys - block, 0.0) + maximum(rows - 2, 0) * maximum(keys - columns * block, 0.0)
    return around + (columns - 1) * (maximum(there - block, 0.0) + maximum(home - block, 0.0))


def num_messages(rows: Any, columns: Any) -> Any:
    """Messages that a member waits for in one pass: keys, queries and results. Numbers or arrays."""
    return rows - 1 + 2 * (columns - 1)


def state_rounds(degree: Any) -> Any:
    """Rounds of the scan over the states of recurrent layers in a group of ``degree`` members (``plan.states``)."""
    return np.where(degree > 1, np.ceil(np.log2(2 * degree)), 0.0)
