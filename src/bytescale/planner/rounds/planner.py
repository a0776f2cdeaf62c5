"""Plans rounds in which all ranks take equally long, for ranks that run in lockstep (``plan.domain``).

Every rank of a round has to be busy for the same time, but rounds may differ in length. Short sequences take nearly the
same time per token, b. So a group of D ranks that shares a sequence of s tokens and W seconds of work can end at any
time in a wide range: after its slice, or after as many short sequences as its ranks still hold::

    T  - - - - - - - - - - - - - - - - - -     W / D                       its slices alone
       |+++++|+++++|.....|.....|.....|         W / D + b (C - s / D)       and full of short ones
       |+++++|+++++|.....|.....|.....|
       |#####|#####|+++++|+++++|+++++|         # slices of a sequence     + short sequences
       |#####|#####|#####|#####|#####|         . of another one           C: capacity of a rank in tokens

    1. Cut      Long sequences, longest first, are cut into runs of alike ones: a round each. A run is as long as there
                is a time T in the ranges of all its sequences, on degrees that sum to the number of ranks (``cut``).
    2. Degrees  are those at this T. Groups that fit into a node stay in one.
    3. Levels   Every round gets a time in its range, so that short sequences fill all of them (``fill``).
    4. Fill     Short sequences, longest first, go to the rank and round that have the most time left, and room.
    5. Again    with looser runs, which are fewer, and one or two rounds more than the fewest that hold all tokens.
    6. Rivals   A plan that is not close to the bound is replaced by the best aligned plan of a baseline, if better.

Plans are compared by the time of all rounds one after another, each as long as its slowest rank and at least as long as
its gathers (``evaluate``). The plan is made as if all ranks were one domain, which holds for any domain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan import Plan
from bytescale.plan.plan import concatenated_ranges, offsets_of
from bytescale.planner.adaptive.degrees import is_ideal
from bytescale.planner.adaptive.effort import FEW
from bytescale.planner.adaptive.trial import group_shapes
from bytescale.planner.adaptive.unequal import shares
from bytescale.planner.batch import checked_lengths, longest_first, rising
from bytescale.planner.candidates import baseline_plans
from bytescale.planner.draft import Draft, assemble
from bytescale.planner.evaluate import evaluate
from bytescale.planner.rounds.cut import Round, RoundBatch, Tried, cut
from bytescale.planner.rounds.fill import fill, levels

WASTES = (7e-4, 2e-3, 5e-3, 1e-2, 2e-2, 1.0)
"""Shares of all time that the ranks of a round may wait, from the best balance to the fewest rounds."""
TRIALS = 3
"""Trials that are filled: those that promise most, and more where all of them end far from the bound."""
CLAIMS = (math.inf, 1.0, 2.0, 4.0)
"""How many times its share of the short sequences, by its work, a run may count on. A batch of few rounds has few."""
CLOSE, GOOD, SAME, FAR = 1.01, 1.03, 1.003, 1.1
"""A time within ``CLOSE`` of the bound ends the search. Of plans within ``SAME``, that of least traffic is taken. Other
claims are tried while no trial promises a time within ``GOOD`` of the bound. A plan within ``FAR`` of it is compared
with static meshes alone."""


def rounds_plan(
    lengths: ArrayLike, *, cluster: Cluster, cost: CostModel, domain: int = 0, num_stages: int = 1, context: int = 0
) -> Plan:
    """Plan one global batch for domains of ``domain`` ranks in lockstep.

    Of up to ``effort.FEW`` sequences, the plan never takes longer than a static mesh. If communication is free, it may,
    by a factor of ``CLOSE``.

    Args:
        lengths: ``[S]`` tokens per sequence.
        cost: tells the time of a group, and of the gathers of a round.
        domain: consecutive ranks that run in lockstep; 0: all.
        num_stages: pipeline stages, whose bubbles count in comparisons. The plan cannot hang under 1F1B.
        context: longest sequence that a static mesh has to hold, if it is longer than the batch's longest.

    Raises:
        PlanError: for an empty batch, lengths below 1, or a sequence that the whole cluster cannot hold.
    """
    lengths = checked_lengths(lengths, cluster=cluster)
    order = longest_first(lengths)
    batch = RoundBatch(lengths=lengths[order], cluster=cluster, cost=cost)
    fewest = -(-int(lengths.sum()) // int(cluster.capacity_tokens.sum()))
    bound = max(float(batch.work.sum()) / cluster.num_ranks, fewest * cost.gather_seconds)

    def timed(plan: Plan) -> tuple[float, Plan]:
        plan = replace(plan, domain=domain or cluster.num_ranks)
        return evaluate(plan, cluster=cluster, cost=cost, num_stages=num_stages).end_seconds, plan

    plans = list[tuple[float, Plan]]()
    for trial in _trials(batch, fewest, bound):
        enough = TRIALS if min((end for end, _ in plans), default=math.inf) <= FAR * bound else 3 * TRIALS
        if len(plans) >= enough or (plans and len(trial.seconds) > fewest + 2):
            break
        draft = _filled(batch, trial)
        if draft is not None:
            draft = replace(draft, sequences=order[draft.sequences])
            plans.append(timed(assemble(draft, lengths=lengths, cluster=cluster, planner="rounds")))
            if plans[-1][0] <= CLOSE * bound:
                break
    first = min((end for end, _ in plans), default=np.inf)
    good = [(int((plan.group_tokens * (plan.group_sizes - 1)).sum()), end, plan) for end, plan in plans]
    good = sorted((tried for tried in good if tried[1] <= SAME * first), key=lambda tried: tried[:2])
    chosen = [(end, plan) for _, end, plan in good[:1]]
    if first > CLOSE * bound or not (is_ideal(cost) or len(lengths) > FEW):
        asked = baseline_plans(
            lengths, cluster=cluster, cost=cost, aligned=True, context=context, meshes_only=first <= FAR * bound
        )
        chosen += map(timed, asked)
    return min(chosen, key=lambda tried: tried[0])[1]


class _Trial(NamedTuple):
    """Long sequences on their ranks, and how long each round takes."""

    placed: list[_Groups]
    ends: FloatArray  # [K, R] seconds after which each rank has ended its slice
    room: IntArray  # [K, R] tokens that it holds besides
    seconds: FloatArray  # [K] of each round


def _trials(batch: RoundBatch, fewest: int, bound: float) -> Iterator[_Trial]:
    """Trials with up to two rounds more than the fewest, those that promise the shortest time first. Then others."""
    found, cost, num_long = list[tuple[float, int, _Trial]](), batch.cost, batch.num_long
    known = set[tuple[int, ...]]()
    for claim in CLAIMS:
        if any(promised <= GOOD * bound and len(trial.seconds) <= fewest + 2 for promised, _, trial in found):
            break
        tried = dict[tuple[int, int], Tried]()
        for runs in (cut(batch, waste, claim, 2 * fewest + 8, tried) for waste in WASTES):
            degrees = tuple(degree for run in runs or () for degree in run.degrees.tolist())
            if runs is None or degrees in known:
                continue
            known.add(degrees)
            placed = _placed(batch, runs)
            for count in range(fewest, max(fewest, len(runs)) + 3):
                if placed is not None and count >= len(runs):
                    trial = _levelled(batch, placed, count)
                    promised = float(np.maximum(trial.seconds + cost.micro_batch_seconds, cost.gather_seconds).sum())
                    found.append((promised, len(found), trial))
    found.sort(key=lambda trial: (len(trial[2].seconds) > fewest + 2, *trial[:2]))
    yield from (trial for _, _, trial in found)
    # Always room: every long sequence has a round of its own, on all ranks, and every rank one short one a round.
    one, most = np.zeros(1, dtype=np.int64), np.minimum(batch.lengths[:num_long], batch.cluster.num_ranks)
    everywhere = _placed(batch, [Round(one + first, most[first : first + 1], one) for first in range(num_long)])
    assert everywhere is not None, "one group on all ranks has all ranks"
    yield _levelled(batch, everywhere, num_long + fewest - ((num_long - len(batch.lengths)) // batch.cluster.num_ranks))


def _placed(batch: RoundBatch, runs: list[Round]) -> list[_Groups] | None:
    """Step 2. None if ranks that differ run out."""
    places, degrees = (
        np.concatenate([np.zeros(0, np.int64), *(getattr(run, name) for run in runs)]) for name in ("places", "degrees")
    )
    exposed = batch.exposed(batch.lengths[places], degrees)  # of all at once, which is faster
    offsets = offsets_of(len(run.places) for run in runs)
    placed = [_groups_of(batch, run, exposed[start:]) for run, start in zip(runs, offsets[:-1].tolist(), strict=True)]
    return [groups for groups in placed if groups is not None] if all(placed) else None


def _levelled(batch: RoundBatch, placed: list[_Groups], num_rounds: int) -> _Trial:
    """Step 3."""
    cluster = batch.cluster
    speeds, shape = cluster.speeds / batch.speed, (num_rounds, cluster.num_ranks)
    ends, held = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    for number, groups in enumerate(placed):
        ends[number, groups.ranks], held[number, groups.ranks] = groups.seconds, groups.tokens
    room = np.maximum(cluster.capacity_tokens - held, 0)
    to_fill = batch.rate * np.where(room >= batch.shortest, room, 0) / speeds
    least = max(batch.cost.gather_seconds - batch.cost.micro_batch_seconds, 0.0)
    work = float(batch.work[batch.num_long :].sum())
    return _Trial(placed, ends, room, levels(ends, to_fill, speeds, work=work, least=least))


def _filled(batch: RoundBatch, trial: _Trial) -> Draft | None:
    """Step 4. None if there is no room for all sequences."""
    gaps = (trial.seconds[:, None] - trial.ends) * (batch.cluster.speeds / batch.speed)
    short = slice(batch.num_long, None)
    bins = fill(batch.lengths[short], batch.work[short], gaps, trial.room)
    return None if bins is None else _draft(batch, trial.placed, bins, len(trial.seconds))


class _Groups(NamedTuple):
    """The long sequences of a round on their ranks."""

    places: IntArray  # [n] in the batch
    degrees: IntArray  # [n]
    ranks: IntArray  # [E] neighbours, group by group
    tokens: IntArray  # [E] that each rank holds
    seconds: FloatArray  # [E] that each rank takes


def _groups_of(batch: RoundBatch, run: Round, exposed: FloatArray) -> _Groups | None:
    """The groups of a run. None if ranks that differ run out."""
    places, degrees, _ = run
    exposed = exposed[: len(places)]
    if batch.cluster.is_uniform:
        tokens = -(-batch.lengths[places] // degrees)
        seconds = batch.work[places] / degrees + exposed
        ranks = concatenated_ranges(run.firsts, run.firsts + degrees)
        return _Groups(places, degrees, ranks, np.repeat(tokens, degrees), np.repeat(seconds, degrees))
    edges = _edges(batch, places, degrees)
    if edges is None:
        return None
    degrees, cluster = np.diff(edges), batch.cluster
    tokens, seconds = np.zeros(edges[-1], dtype=np.int64), np.zeros(edges[-1])
    for place, first, stop, more in zip(places.tolist(), edges[:-1], edges[1:], exposed, strict=True):
        length, span = int(batch.lengths[place]), slice(first, stop)
        tokens[span] = shares(length, cluster.speeds[span], cluster.capacity_tokens[span])
        seconds[span] = batch.work[place] * batch.speed * tokens[span] / (length * cluster.speeds[span]) + more
    return _Groups(places, degrees, np.arange(edges[-1]), tokens, seconds)


def _edges(batch: RoundBatch, places: IntArray, degrees: IntArray) -> IntArray | None:
    """``[n + 1]`` the first rank of each group and the end of the last, for groups of as much speed as ``degrees``."""
    cluster = batch.cluster
    speed = np.concatenate(([0.0], np.cumsum(cluster.speeds / batch.speed)))
    capacity = np.concatenate(([0], np.cumsum(cluster.capacity_tokens)))
    edges, wanted = [0], 0.0
    lengths, spread = batch.lengths[places], cluster.num_ranks / float(max(degrees.sum(), batch.slots))
    for degree, length in zip(degrees.tolist(), lengths.tolist(), strict=True):
        wanted += degree * spread
        nearest = int(np.abs(speed - wanted).argmin())
        holding = int(capacity.searchsorted(capacity[edges[-1]] + length))
        edges.append(max(min(nearest, edges[-1] + length), edges[-1] + 1, holding))
        if edges[-1] > cluster.num_ranks:
            return None
    return np.array(edges)


def _draft(batch: RoundBatch, placed: list[_Groups], bins: IntArray, num_rounds: int) -> Draft | None:
    """The plan's groups, with places in the batch as sequences. None if a rank would pause (``_without_pauses``)."""
    num_ranks = batch.cluster.num_ranks
    rounds = np.repeat(np.arange(len(placed)), [len(groups.places) for groups in placed])
    places, degrees, ranks = (
        np.concatenate([np.zeros(0, np.int64), *(getattr(groups, name) for groups in placed)])
        for name in ("places", "degrees", "ranks")
    )
    held = np.zeros((num_rounds, num_ranks), dtype=bool)
    held[np.repeat(rounds, degrees), ranks] = True
    without = _without_pauses(held, bins)
    if without is None:
        return None
    order, bins = without
    rounds, shared = order[rounds], degrees > 1
    members = np.repeat(shared, degrees)
    bins = np.concatenate((rounds[~shared] * num_ranks + ranks[~members], bins))
    whole = np.append(places[~shared], np.arange(batch.num_long, len(batch.lengths)))
    by_bin = rising(bins)
    whole, bins = whole[by_bin], bins[by_bin]
    heads = np.flatnonzero(np.append(True, bins[1:] != bins[:-1])[: len(bins)])
    columns, ranks, weights = group_shapes(
        batch.lengths[places[shared]], degrees[shared], ranks[members], batch.cluster, batch.cost
    )
    ones = np.ones(len(heads), dtype=np.int64)
    return Draft(
        sequences=np.concatenate((places[shared], whole)),
        sequence_counts=np.concatenate((np.ones(int(shared.sum()), np.int64), np.diff(np.append(heads, len(bins))))),
        ranks=np.append(ranks, bins[heads] % num_ranks),
        degrees=np.append(degrees[shared], ones),
        slots=np.append(rounds[shared], bins[heads] // num_ranks),
        weights=None if weights is None else np.append(weights, ones),
        columns=np.append(columns, ones),
    )


def _without_pauses(held: NDArray[np.bool_], bins: IntArray) -> tuple[IntArray, IntArray] | None:
    """Let the rounds in which a rank has no work be its last ones, because micro-batch i of a rank belongs to round i.

    Rounds in which fewer ranks have work come later. A rank that would still pause gets the shortest sequence of a rank
    that has other work, if possible in the same round, or one of its own from a later round.

    Args:
        held: ``[K, R]`` whether a rank has long sequences in a round. These stay.
        bins: ``[n]`` bin of each short sequence, ``round R + rank``.

    Returns:
        ``[K]`` the new place of each round, and the new ``bins``; None if too few sequences can be moved.
    """
    num_ranks, shape = held.shape[1], held.shape
    busy = held | (np.bincount(bins, minlength=held.size) > 0).reshape(shape)
    by_work = np.argsort(-busy.sum(axis=1), kind="stable")
    order = np.argsort(by_work)
    held, bins = held[by_work], order[bins // num_ranks] * num_ranks + bins % num_ranks
    counts = np.bincount(bins, minlength=held.size).reshape(shape)
    for _ in range(held.size):
        busy = held | (counts > 0)
        pauses = np.argwhere(~busy[:-1] & (np.cumsum(busy[::-1], axis=0)[::-1][1:] > 0))
        if not len(pauses):
            return order, bins
        number, rank = pauses[0].tolist()
        spare = counts - ~held
        spare[number + 1 :, rank] = counts[number + 1 :, rank]
        giver = int(spare[number].argmax()) + number * num_ranks
        if spare.flat[giver] < 1:
            giver = int(spare.argmax())
        if spare.flat[giver] < 1:
            return None
        bins[np.flatnonzero(bins == giver)[-1]] = number * num_ranks + rank
        counts.flat[giver] -= 1
        counts[number, rank] += 1
    return None
