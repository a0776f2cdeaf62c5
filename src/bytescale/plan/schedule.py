"""The order in which one pipeline stage runs its micro-batches: 1F1B, plain or interleaved.

The runtime runs exactly these actions, the simulator times them, and ``plan.pipeline_order`` checks that they cannot
wait in a circle. With v chunks of layers on each rank (virtual stages), chunk c of stage s is part ``c p + s`` of the
model's ``v p`` parts, and micro-batches go through all parts in turn::

    warm-up    forwards only: p - 1 - s of them; interleaved 2 (p - 1 - s) + (v - 1) p
    steady     one forward, one backward, in turn
    cool-down  the remaining backwards

Without interleaving, forwards run micro-batch by micro-batch. With interleaving they run in rounds of p micro-batches:
a round goes through chunk 0, then through chunk 1, and so on (Megatron-LM, Narayanan et al. 2021, section 2.2).
Backwards take the same rounds, with the chunks in reverse order.

Every action also has a **time** on one clock for the whole mesh (``action_times``), later than the time of everything
that the action may wait for. It decides when a message is posted, so that no ranks wait in a circle (``messages``).

Interleaved rounds have to be complete and the same in pipelines that share a group. So all pipelines follow the order
of the one with the most micro-batches, rounded up to whole rounds, and skip the micro-batches that they do not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bytescale.common.arrays import IntArray


@lru_cache(maxsize=4096)
def stage_actions(num_micro_batches: int, num_stages: int, stage: int, num_chunks: int = 1, most: int = 0) -> IntArray:
    """``[2 v m, 3]``: for each action, in order, whether it is a backward (0, 1), its chunk, and its micro-batch.

    Args:
        num_micro_batches: m of this pipeline; other pipelines may have more or fewer, or none.
        num_stages: p.
        stage: s; stage 0 reads the tokens.
        num_chunks: v.
        most: micro-batches of the pipeline that has the most; it matters for v > 1 only.
    """
    warm_up = num_stages - 1 - stage
    if num_chunks > 1:
        warm_up, count = 2 * warm_up + (num_chunks - 1) * num_stages, max(num_micro_batches, most)
    else:
        count = num_micro_batches
    # Forwards ``[n, 2]`` (chunk, micro-batch) in whole rounds; micro-batches that do not exist are left out at the end.
    turn, chunk, place = np.indices((-(-count // num_stages), num_chunks, num_stages)).reshape(3, -1)
    forwards = np.stack([chunk, turn * num_stages + place], axis=1)
    backwards = forwards * [-1, 1] + [num_chunks - 1, 0]
    count = len(forwards)
    warm = min(warm_up, count)
    number = np.arange(count)
    order = np.empty((2 * count, 3), dtype=np.int64)
    order[np.where(number < warm, number, 2 * number - warm)] = np.insert(forwards, 0, 0, axis=1)
    order[np.where(number < count - warm, warm + 2 * number + 1, count + number)] = np.insert(backwards, 0, 1, axis=1)
    order = order[order[:, 2] < num_micro_batches]
    order.flags.writeable = False
    return order


def action_times(actions: IntArray, num_stages: int, stage: int | IntArray, num_chunks: int = 1) -> IntArray:
    """``[n]``: the time of each of ``actions [n, 3]`` (rows of ``stage_actions``) on the clock that all ranks share.

    ``stage`` is the stage of all actions, or ``[n]``, one stage for each action.

    Let k be the number of a forward or of a backward in its stage's order, and W the warm-up forwards of stage 0. With
    ``d`` the number of warm-up forwards that each later stage has less (1, or 2 with interleaving)::

        forward k on stage s     2 k + d s
        backward k               2 k - d s + 2 W + 1

    An action's time is later than that of everything that it waits for:

    * On a stage, backward k follows forward ``k + W - d s``, whose time is one less; the next forward's is one more.
    * From part to part, a forward is d later on the next stage, and a backward is d later on the previous stage. From
      the last stage to the first one (with interleaving) k grows by p and s falls by p - 1, so a forward is
      ``2 p - 2 (p - 1) = 2`` later.
    * On the last part, the forward of backward number w is number ``w + (v - 1) p``. The time of the backward is
      ``2 w - d (p - 1) + 2 W + 1``, one more than the forward's.

    So members of a slice group that have it at the same index (``planner.adaptive.aligned``) have it at the same time.
    """
    backward, chunk, index = actions.T
    drop = 1 if num_chunks == 1 else 2
    warm_up = drop * (num_stages - 1) + (num_chunks - 1) * num_stages
    turn, place = index // num_stages, index % num_stages
    chunk_in_order = np.where(backward == 1, num_chunks - 1 - chunk, chunk)
    number = (turn * num_chunks + chunk_in_order) * num_stages + place
    return 2 * number + np.where(backward == 1, 2 * warm_up + 1 - drop * stage, drop * stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The output of one action that an action on another stage needs. A *place* is an action's number on its stage.

    Attributes:
        backward: 1 for the gradient of an activation, 0 for an activation.
        micro_batch: index of the micro-batch.
        boundary: the part of the model before the boundary that the message crosses.
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
def messages(
    num_micro_batches: int, num_stages: int, taker: int, num_chunks: int = 1, most: int = 0
) -> tuple[Message, ...]:
    """All messages that stage ``taker`` receives, in the order of posting. Arguments as in ``stage_actions``.

    **No order of waiting can hang.** Let a message have the time of its maker plus one half. On both stages it is
    posted after all actions with an earlier time and before all with a later one. Whether a rank waits for its actions
    and messages one by one (NCCL) or only for those that it needs (gloo), what waits has a later time than what it
    waits for. A receive that is posted earlier breaks this.
    """
    actions = stage_actions(num_micro_batches, num_stages, taker, num_chunks, most)
    backward, chunk, index = actions.T
    part = chunk * num_stages + taker + np.where(backward == 1, 1, -1)
    taken_at = np.flatnonzero((part >= 0) & (part < num_stages * num_chunks))
    maker_chunk, maker = part[taken_at] // num_stages, part[taken_at] % num_stages
    made = np.stack([backward[taken_at], maker_chunk, index[taken_at]], axis=1)
    times = action_times(made, num_stages, maker, num_chunks)
    own_times = action_times(actions, num_stages, taker, num_chunks)
    posted_before = np.searchsorted(own_times, times, side="right")
    order = np.argsort(times, kind="stable")
    columns = (made, part[taken_at] - made[:, 0], maker, taken_at, posted_before)
    found = []
    for action, boundary, stage, taken, posted in zip(*(column[order].tolist() for column in columns), strict=True):
        made_at = _places(num_micro_batches, num_stages, stage, num_chunks, most)[tuple(action)]
        found.append(
            Message(
                backward=action[0],
                micro_batch=action[2],
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
def _places(
    num_micro_batches: int, num_stages: int, stage: int, num_chunks: int, most: int
) -> dict[tuple[int, int, int], int]:
    actions = stage_actions(num_micro_batches, num_stages, stage, num_chunks, most)
    return {(backward, chunk, index): place for place, (backward, chunk, index) in enumerate(actions.tolist())}
