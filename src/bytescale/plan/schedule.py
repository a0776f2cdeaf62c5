"""The order in which one pipeline stage runs its micro-batches: 1F1B.

The runtime runs exactly these actions, the simulator times them, and ``plan.pipeline_order`` checks that they cannot
wait in a circle. Of p stages, stage s runs::

    warm-up    forwards only: p - 1 - s of them
    steady     one forward, one backward, in turn
    cool-down  the remaining backwards

Every action also has a **time** on one clock for the whole mesh (``action_times``), later than the time of everything
that the action may wait for. It decides when a message is posted, so that no ranks wait in a circle (``messages``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bytescale.common.arrays import IntArray


@lru_cache(maxsize=4096)
def stage_actions(num_micro_batches: int, num_stages: int, stage: int) -> IntArray:
    """``[2 m, 2]``: for each action, in order, whether it is a backward (0, 1), and its micro-batch.

    Args:
        num_micro_batches: m of this pipeline; other pipelines may have more or fewer, or none.
        num_stages: p.
        stage: s; stage 0 reads the tokens.
    """
    count, number = num_micro_batches, np.arange(num_micro_batches)
    warm = min(num_stages - 1 - stage, count)
    order = np.empty((2 * count, 2), dtype=np.int64)
    order[np.where(number < warm, number, 2 * number - warm)] = np.stack([0 * number, number], axis=1)
    order[np.where(number < count - warm, warm + 2 * number + 1, count + number)] = np.stack(
        [0 * number + 1, number], axis=1
    )
    order.flags.writeable = False
    return order


def action_times(actions: IntArray, num_stages: int, stage: int | IntArray) -> IntArray:
    """``[n]``: the time of each of ``actions [n, 2]`` (rows of ``stage_actions``) on the clock that all ranks share.

    ``stage`` is the stage of all actions, or ``[n]``, one stage for each action::

        forward k on stage s     2 k + s
        backward k               2 k - s + 2 p - 1

    An action's time is later than that of everything that it waits for:

    * On a stage, backward k follows forward ``k + p - 1 - s``, whose time is one less; the next forward's is one more.
    * From stage to stage, a forward is one later on the next stage, and a backward is one later on the previous stage.
    * On the last stage, ``2 k + p - 1`` is the time of forward k, and that of its backward is one more.

    So members of a slice group that have it at the same index (``planner.adaptive.aligned``) have it at the same time.
    """
    backward, index = actions.T
    return 2 * index + np.where(backward == 1, 2 * num_stages - 1 - stage, stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The output of one action that an action on another stage needs. A *place* is an action's number on its stage.

    Attributes:
        backward: 1 for the gradient of an activation, 0 for an activation.
        micro_batch: index of the micro-batch.
        boundary: the stage before the boundary that the message crosses.
        maker, made_at: the stage that sends, and the place of the action that makes it. It is sent right afterwards.
        taker, taken_at: the stage that receives, and the place of the action that needs it.
        posted_before: the place of the taker's action before which the receive is posted: the first action whose time
            is above the maker's, which is ``taken_at`` or earlier.
    """

    backward: int
    micro_batch: int
    boundary: int
    maker: int
    made_at: int
    taker: int
    taken_at: int
    posted_before: int


@lru_cache(maxsize=4096)
def messages(num_micro_batches: int, num_stages: int, taker: int) -> tuple[Message, ...]:
    """All messages that stage ``taker`` receives, in the order of posting. Arguments as in ``stage_actions``.

    **No order of waiting can hang.** Let a message have the time of its maker plus one half. On both stages it is
    posted after all actions with an earlier time and before all with a later one. Whether a rank waits for its actions
    and messages one by one (NCCL) or only for those that it needs (gloo), what waits has a later time than what it
    waits for. A receive that is posted earlier breaks this.
    """
    actions = stage_actions(num_micro_batches, num_stages, taker)
    makers = taker + np.where(actions[:, 0] == 1, 1, -1)
    taken_at = np.flatnonzero((makers >= 0) & (makers < num_stages))
    made, maker = actions[taken_at], makers[taken_at]
    times = action_times(made, num_stages, maker)
    posted_before = np.searchsorted(action_times(actions, num_stages, taker), times, side="right")
    order = np.argsort(times, kind="stable")
    columns = (made, maker - made[:, 0], maker, taken_at, posted_before)
    found = []
    for action, boundary, stage, taken, posted in zip(*(column[order].tolist() for column in columns), strict=True):
        made_at = _places(num_micro_batches, num_stages, stage)[tuple(action)]
        found.append(
            Message(
                backward=action[0],
                micro_batch=action[1],
                boundary=boundary,
                maker=stage,
                made_at=made_at,
                taker=taker,
                taken_at=taken,
                posted_before=posted,
            )
        )
    return tuple(found)


@lru_cache(maxsize=4096)
def _places(num_micro_batches: int, num_stages: int, stage: int) -> dict[tuple[int, int], int]:
    actions = stage_actions(num_micro_batches, num_stages, stage)
    return {(backward, index): place for place, (backward, index) in enumerate(actions.tolist())}
