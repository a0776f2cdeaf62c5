"""Ranks that differ in speed and capacity: the same steps as ``adaptive``, with shares that depend on the member.

A shared sequence takes consecutive ranks of one plateau, as many as hold it and end it within the target. Each member
gets tokens in proportion to its speed, but never more than its capacity; the remaining tokens go to the other members,
again in proportion to speed. These shares are the group's weights, so the runtime's chunks are exactly these tokens.

The strip that a sequence leaves of its plateau is measured in speed, not in ranks. For example, the slow half of the
ranks may do less than a third of the work; if no other long sequence fits on it, the sequence should take it as well.

One pass costs some 30 microseconds per shared sequence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.cost import Cluster, CostModel
from bytescale.planner.adaptive.fill import deal
from bytescale.planner.adaptive.placement import Placement
from bytescale.planner.adaptive.trial import Batch, Trial, num_shared

FloatArray = NDArray[np.float64]

# (slack: factor on the target; snap: as in ``blocks``, but a share of speed; floors: sequences that end within the
# target / floors on one rank stay whole)
ATTEMPTS = (
    *((1.005, snap, 1.0) for snap in (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)),
    *((1.005, 0.0, floors) for floors in (4.0, 16.0, 64.0)),
    *((slack, 0.3, 1.0) for slack in (1.05, 1.2, 1.5, 2.5)),
)


def mixed_batch(lengths: IntArray, cluster: Cluster, cost: CostModel) -> Batch:
    """The batch of ``lengths`` ``[S]``, longest first. ``local_seconds`` are on the fastest rank that holds each."""
    work = cost.work_seconds(lengths) + lengths * (cost.micro_batch_seconds / float(cluster.capacity_tokens.mean()))
    by_capacity = np.argsort(-cluster.capacity_tokens, kind="stable")
    capacities = cluster.capacity_tokens[by_capacity]
    fastest = np.maximum.accumulate(cluster.speeds[by_capacity])
    holding = np.searchsorted(-capacities, -lengths, side="right")  # ranks that hold each, largest first
    whole = holding > 0
    return Batch(
        lengths=lengths,
        fewest=np.where(whole, 1, 2),
        local_seconds=work / np.where(whole, fastest[np.maximum(holding, 1) - 1], 1.0),
        cluster=cluster,
        cost=cost,
        target=float(work.sum() / cluster.speeds.sum()),
        pack_tokens=int(cluster.capacity_tokens.max()),
    )


def mixed_search(batch: Batch, good_enough: float) -> Trial:
    """The best of a few attempts. Stops at a makespan within a factor ``good_enough`` of the target."""
    best: Trial | None = None
    for slack, snap, floors in ATTEMPTS:
        trial = _try(batch, slack * batch.target, snap, floors)
        if best is None or trial.end < best.end:
            best = trial
        if best.end <= good_enough * batch.target:
            break
    assert best is not None, "there is at least one attempt"
    return best


def _try(batch: Batch, target: float, snap: float, floors: float) -> Trial:
    cluster = batch.cluster
    # ``local_seconds`` are on the fastest rank. With larger floors, sequences that slow ranks end too late are shared.
    count = num_shared(batch.fewest, batch.local_seconds, target / floors)
    placed, weights = _place(batch, batch.lengths[:count], target, snap)
    work = batch.cost.work_seconds(batch.lengths[count:])
    work += batch.lengths[count:] * (batch.cost.micro_batch_seconds / float(cluster.capacity_tokens.mean()))
    ranks, free_at = deal(
        work, placed.free_at, speeds=cluster.speeds, lengths=batch.lengths[count:], capacity=cluster.capacity_tokens
    )
    return Trial(
        shared=np.arange(count),
        placed=placed,
        local=np.arange(count, len(batch.lengths)),
        local_ranks=ranks,
        end=float(free_at.max()),
        weights=weights,
    )


def _place(batch: Batch, lengths: IntArray, target: float, snap: float) -> tuple[Placement, IntArray]:
    """Place each sequence, longest first, on the lowest plateau that can end it in time.

    Returns the placement and all members' tokens ``[E]``. A plateau with room for the next sequence always exists: the
    ranks that held the previous one, because the next one is no longer.
    """
    cluster, cost = batch.cluster, batch.cost
    capacity, speed = (np.concatenate(([0], np.cumsum(part))) for part in (cluster.capacity_tokens, cluster.speeds))
    time, start, stop = np.zeros(1), np.zeros(1, np.int64), np.array([cluster.num_ranks])
    first, degrees = np.empty_like(lengths), np.empty_like(lengths)
    weights = [np.zeros(0, np.int64)]
    for group, (length, work) in enumerate(zip(lengths.tolist(), cost.work_seconds(lengths).tolist(), strict=True)):
        holds = np.searchsorted(capacity, capacity[start] + length)
        left = np.maximum(target - time - cost.micro_batch_seconds, 1e-9 * target)
        in_time = np.searchsorted(speed, (speed[start] + work / left) * (1 - 1e-12))
        end = np.maximum(holds, in_time)
        fits = end <= stop
        strip = speed[stop] - speed[np.minimum(end, stop)]
        end = np.where(fits & (strip <= snap * (speed[stop] - speed[start])), stop, end)
        if fits.any():
            chosen = int(np.where(fits, time, np.inf).argmin())
        else:
            end = np.where(holds <= stop, stop, end)
            alone = time + work / (speed[stop] - speed[start])
            chosen = int(np.where(holds <= stop, alone, np.inf).argmin())
        end = np.minimum(end, start + length)  # every member gets a token
        ranks = slice(int(start[chosen]), int(end[chosen]))
        tokens = shares(length, cluster.speeds[ranks], cluster.capacity_tokens[ranks])
        height = _seconds(cost, length, work, tokens, cluster.speeds[ranks], ranks.start)
        first[group], degrees[group] = ranks.start, ranks.stop - ranks.start
        weights.append(tokens)
        rest = [chosen] if ranks.stop < stop[chosen] else []
        time = np.concatenate((np.delete(time, chosen), [time[chosen] + height], time[rest]))
        start = np.concatenate((np.delete(start, chosen), [ranks.start], np.full(len(rest), ranks.stop)))
        stop = np.concatenate((np.delete(stop, chosen), [ranks.stop], stop[rest]))
    order = np.argsort(start)
    free_at = np.repeat(time[order], stop[order] - start[order])
    return Placement.side_by_side(first, degrees, free_at), np.concatenate(weights)


def shares(length: int, speeds: FloatArray, capacity: IntArray) -> IntArray:
    """``[N]`` tokens of each member, at least 1 where there are enough, summing to ``length``.

    Tokens are in proportion to speed. Members whose capacity is below their share are filled, and the others share the
    rest. ``length`` is at most the sum of the capacities.
    """
    ideal = np.zeros(len(speeds))
    open_to = np.ones(len(speeds), dtype=bool)
    while True:
        rest = length - capacity[~open_to].sum()
        ideal = np.where(open_to, speeds * rest / max(speeds[open_to].sum(), 1e-300), capacity)
        full = open_to & (ideal > capacity)
        if not full.any():
            break
        open_to &= ~full
    tokens = np.minimum(np.maximum(np.floor(ideal + 1e-9).astype(np.int64), min(1, length // len(speeds))), capacity)
    # Tokens that rounding left over go, one each, to the members furthest below their ideal share. (In the rare case of
    # too many tokens, the members furthest above it give back one each.)
    while missing := length - int(tokens.sum()):
        step = 1 if missing > 0 else -1
        may = tokens < capacity if step > 0 else tokens > 1
        below = np.argsort(np.where(may, step * (tokens - ideal), np.inf), kind="stable")
        tokens[below[: min(abs(missing), int(may.sum()))]] += step
    return tokens


def _seconds(cost: CostModel, length: int, work: float, tokens: IntArray, speeds: FloatArray, first: int) -> float:
    """Time of the slowest member, in seconds."""
    degree = len(tokens)
    compute = work * float((tokens / speeds).max()) / length
    leaves_node = cost.leaves_node(first, degree)
    exposed = float(cost.exposed_seconds(length, float(length) ** 2, degree, leaves_node))
    return compute + exposed + cost.micro_batch_seconds
