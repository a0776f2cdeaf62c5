"""Our planner: degrees adapt to the cluster and the batch, so that no rank waits and all ranks end together.

    1. Target    the time at which all ranks would end if all work were spread evenly (``target``)
    2. Degrees   each sequence takes the fewest ranks that hold it and end it in time (``degrees``)
    3. Place     shared sequences take free rank-time (``free``), widest first: on consecutive ranks that are free at
                 the same moment or, if one of them is late there, on any ranks that are free long enough (``place``)
    4. Fill      whole sequences go to the ranks that are free first, longest first (``fill``)
    5. Again     while the makespan is not close to the target: steps 2 to 4 with a later makespan T to aim at, and with
                 a shorter longest block, which has more traffic
    6. Rings     a plan with grids is replaced by one that has rings alone, if that is better
    7. Rivals    a plan that is not good enough is replaced by the best plan of the baselines, if that is better

Plans are compared by the caller's ``step_seconds``, such as the simulator's, or by their makespans (``evaluate``).

In a pipeline of equal ranks, many longest blocks are tried, and several sizes of packs. Ranks that differ in speed or
capacity take the same steps with shares of their own (``unequal``), but nothing is reserved.
Shape letters: S sequences, longest first; G of them shared; R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import ArrayLike

from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan import Plan
from bytescale.planner.adaptive import effort
from bytescale.planner.adaptive.aligned import align, is_aligned
from bytescale.planner.adaptive.degrees import Rectangles, equal_blocks, is_ideal
from bytescale.planner.adaptive.fill import deal
from bytescale.planner.adaptive.free import Placement
from bytescale.planner.adaptive.place import reserve, share_low, stack
from bytescale.planner.adaptive.target import Batch
from bytescale.planner.adaptive.trial import Trial, pipeline_ends, trial_plan
from bytescale.planner.adaptive.unequal import unequal_blocks
from bytescale.planner.baselines import greedy_plan
from bytescale.planner.batch import checked_lengths, longest_first
from bytescale.planner.candidates import baseline_plans


def adaptive_plan(
    lengths: ArrayLike,
    *,
    cluster: Cluster,
    cost: CostModel,
    num_stages: int = 1,
    context: int = 0,
    step_seconds: Callable[[Plan], float] | None = None,
) -> Plan:
    """Plan one global batch so that all ranks end as early as possible, with little traffic.

    With ``step_seconds``, no plan of up to ``effort.FEW`` sequences has a longer step than a baseline's plan, unless
    communication is free (``_best_with_baselines``).

    Args:
        lengths: ``[S]`` tokens per sequence.
        num_stages: pipeline stages; with more than one, the plan cannot hang under 1F1B (``aligned``).
        context: longest sequence that a static mesh has to hold, if it is longer than the batch's longest.
        step_seconds: the time of a plan's step in seconds. Large pipelines do without (``effort.SIMULATED``).

    Raises:
        PlanError: for an empty batch, lengths below 1, or a sequence that the whole cluster cannot hold.
    """
    lengths = checked_lengths(lengths, cluster=cluster)
    order = longest_first(lengths)
    flat = replace(Batch.of(lengths[order], cluster, cost), context=context, step_seconds=step_seconds)
    planned = partial(trial_plan, order=order, lengths=lengths, planner="adaptive")
    if num_stages == 1:
        return _without_pipeline(flat, partial(planned, flat))
    piped = replace(flat, num_stages=num_stages)
    piped = piped if piped.num_timed else replace(piped, step_seconds=None)
    if not cluster.is_uniform:
        return _in_unequal_pipelines(piped, planned)
    plan = _in_pipeline(piped, planned)
    if piped.rings is not None and piped.makespan(plan) > num_stages * piped.rings.fastest:
        plan = min((plan, _in_pipeline(piped.rings, planned)), key=piped.step)
    return _best_with_baselines(plan, piped)


def _in_pipeline(piped: Batch, planned: Callable[[Batch, Trial], Plan]) -> Plan:
    """Steps 2 to 5 in a pipeline of equal ranks."""
    trials = list[Trial]()
    for size in pack_sizes(piped.pack_tokens):
        trials += tried_in_pipeline(replace(piped, pack_tokens=size))
    return min((planned(piped, trial) for trial in contenders(trials, piped.num_timed)), key=piped.step)


def _in_unequal_pipelines(piped: Batch, planned: Callable[[Batch, Trial], Plan]) -> Plan:
    """Plan (steps 2 to 7) pipelines whose ranks differ in speed or memory.

    Candidates are searched as if there were no pipeline, with grids and with rings alone, and kept if they cannot hang.
    """
    flat = replace(piped, num_stages=1)
    ours = [planned(batch, search(batch)) for batch in (flat, flat.rings) if batch is not None]
    plans = [plan for plan in ours if is_aligned(plan)]
    if not plans:
        candidate = greedy_plan(ours[0].lengths, cluster=piped.cluster, cost=piped.cost, num_buckets=1)
        plans.append(align(candidate, cluster=piped.cluster, cost=piped.cost))
    return _best_with_baselines(min(plans, key=piped.step), piped)


def _without_pipeline(flat: Batch, planned: Callable[[Trial], Plan]) -> Plan:
    """Steps 2 to 7. The plan never ends later than one that is searched with rings alone.

    Either search is left out where it cannot be better.
    """
    rings, is_uniform = flat.rings, flat.cluster.is_uniform
    no_grids = (
        rings if is_uniform and rings and max(rings.fastest, rings.target) <= effort.CLOSE * flat.target else None
    )
    trial = search(no_grids or flat)
    plan = planned(trial)
    if (rings and not no_grids) and (
        flat.makespan(plan) > rings.fastest if is_uniform else flat.cluster.num_ranks >= effort.WIDE
    ):
        plan = min((plan, planned(search(rings))), key=flat.step)
    many_whole = not len(trial.shared) and plan.num_sequences >= effort.MANY_A_RANK * flat.cluster.num_ranks
    if plan.num_sequences > effort.FEW and (many_whole or trial.end <= _good_enough(flat)):
        return plan  # evaluating it would take as long as planning, and no baseline deals many whole ones better
    return _best_with_baselines(plan, flat)


def pack_sizes(capacity: int) -> list[int]:
    """Sizes of packs of whole sequences that are tried in a pipeline, in tokens: ``capacity``, and repeated halves.

    Smaller packs fill and drain a pipeline in less time, at the cost of more launches.
    """
    return [capacity >> halving for halving in range(max(0, int(np.log2(max(capacity, 1) / effort.MIN_PACK))) + 1)]


def tried_in_pipeline(batch: Batch) -> list[Trial]:
    """Steps 2 to 5 in a pipeline: several longest blocks, the best with all whole slots and several makespans."""
    allowed = max(effort.LEAST_TRIALS, effort.SEQUENCES_TRIED // len(batch.lengths))
    levels = {}
    for longest in batch.longest_blocks():
        blocks = _blocks(batch, longest)
        levels[blocks.degrees.tobytes()] = batch.promised(blocks), longest, blocks
    trials, best_of = list[Trial](), list[tuple[float, float, float, Rectangles]]()
    for promised, longest, blocks in sorted(levels.values(), key=lambda level: level[:2])[
        : allowed // (2 * len(effort.WHOLE_SLOTS))
    ]:
        if best_of and promised > min(best_of)[0]:
            break
        trials += [_stacked(batch, blocks, effort.LATER * promised, whole_slot) for whole_slot in effort.WHOLE_SLOTS]
        best_of.append((min(trial.end for trial in trials[-len(effort.WHOLE_SLOTS) :]), promised, longest, blocks))
    for end, promised, _, blocks in sorted(best_of, key=lambda level: level[:3])[: effort.REFINED]:
        for whole_slot in effort.WHOLE_SLOTS_IN_PIPELINE:
            early, late = effort.LATER * promised, max(end, 1.03 * effort.LATER * promised)
            first = math.sqrt(early * late) if whole_slot in effort.WHOLE_SLOTS else early
            attempts = min(effort.AIMS, allowed - len(trials))
            trials += bisected(partial(_stacked, batch, blocks, whole_slot=whole_slot), early, late, first, attempts)
    return trials


def bisected(attempt: Callable[[float], Trial], early: float, late: float, aim: float, most: int) -> Iterator[Trial]:
    """At most so many attempts to end by a makespan: first ``aim``, then others between ``early`` and ``late``."""
    for _ in range(most):
        if late < effort.CLOSE * early:
            break
        trial = attempt(aim)
        yield trial
        late = min(late, max(trial.end, early))
        early, late = (early, min(aim, late)) if trial.end <= effort.CLOSE * aim else (max(aim, early), late)
        aim = math.sqrt(early * late)


def search(batch: Batch) -> Trial:
    """Steps 2 to 5: the first trial that is good enough, or else the best."""
    trials = []
    for trial in _trials(batch):
        if trial.end <= _good_enough(batch) or batch.stays_whole:
            return trial
        trials.append(trial)
    return best(trials)


def _good_enough(batch: Batch) -> float:
    return batch.target * (effort.GOOD_ENOUGH if batch.cluster.is_uniform else effort.GOOD_ENOUGH_UNEQUAL)


def best(trials: list[Trial]) -> Trial:
    """The trial with the least traffic of those that end about first."""
    latest = effort.CLOSE * min(trial.end for trial in trials)
    return min((trial for trial in trials if trial.end <= latest), key=lambda trial: trial.traffic_tokens)


def contenders(trials: list[Trial], most: int) -> list[Trial]:
    """The ``best`` trial, and then others that end differently, first those that end first: ``most`` trials in all."""
    first = best(trials)
    others = {trial.end: trial for trial in trials if trial.end != first.end}
    return [first, *(others[end] for end in sorted(others)[: most - 1])]


def _trials(batch: Batch) -> Iterator[Trial]:
    """Trials of steps 2 to 4, roughly in the order of their traffic and of the time that they take."""
    first, later, enough = (factor * batch.target for factor in (effort.FIRST, effort.LATER, effort.GOOD_ENOUGH))
    is_flat, late = batch.cluster.is_uniform, np.inf
    if is_flat:
        yield _stacked(batch, _blocks(batch, first), first)
        blocks = _blocks(batch, enough)
        free = stack(blocks, batch.cluster.num_ranks, target=enough)
        yield _filled(batch, blocks, free.placement())
        count = len(blocks.items)
        share_low(free, batch.lengths[count:], batch.work_seconds[count:], batch.cost)
        yield _filled(batch, blocks, free.placement())
        yield from _odd_ones_shared(batch)
    reserved = _reserved(batch, later) if is_flat else None
    if reserved is not None:
        yield reserved
    longer = np.inf  # end of the trial with longer blocks, without whole slots
    for part in _parts(batch):
        blocks = _blocks(batch, later / part)
        ends = list[float]()
        for whole_slot in effort.WHOLE_SLOTS:
            trial = _stacked(batch, blocks, later, whole_slot)
            if trial.end == longer and not (ends or is_flat):
                break  # the ranks need longer blocks to hold the sequences, so these trials are those of longer blocks
            ends.append(trial.end)
            yield trial
        if not ends:
            continue
        if min(ends) > late and (not is_flat or len(batch.lengths) > effort.FEW):
            break  # shorter blocks would take even more ranks and time
        late, longer = min(late, *ends), ends[0]
    if reserved is not None or not is_flat:

        def attempt(makespan: float) -> Trial:
            trial = _reserved(batch, makespan) if is_flat else None
            return trial or _stacked(batch, _blocks(batch, makespan), makespan)

        yield from bisected(attempt, later, late, math.sqrt(later * late), effort.BISECTIONS)


def _odd_ones_shared(batch: Batch) -> Iterator[Trial]:
    """Of sequences that are about equal, every rank gets as many whole ones, and all ranks share what is left."""
    num_ranks, most = batch.cluster.num_ranks, len(batch.lengths)
    rounds, odd = divmod(most, num_ranks)
    if not rounds or not odd or batch.num_shared(effort.LATER * batch.target) or batch.stays_whole:
        return
    whole = float(batch.work_seconds[odd:].sum()) / num_ranks
    for aim, part in list(product(effort.ODD_ONES, effort.PARTS))[: effort.ODD_BLOCKS // odd]:
        room = max(aim * batch.target - whole, 0.0) / part
        blocks = equal_blocks(batch.tried, batch.lengths[:odd], batch.fewest[:odd], room)
        yield _stacked(batch, blocks, aim * batch.target)


def _parts(batch: Batch) -> list[int]:
    """The target over the longest blocks tried: those that make few groups, or at most twice as many as the first."""
    counts = [batch.num_shared(effort.LATER * batch.target / part) for part in effort.PARTS]
    most = max(effort.FEW, 2 * counts[0])
    few = [part for part, count in zip(effort.PARTS, counts, strict=True) if count <= most]
    if not batch.cluster.is_uniform or batch.cost.row_bytes_per_token is None:
        return few
    # Blocks to which the longest sequence cannot keep would give it, and many others, far too many ranks.
    return [part for part in few if part == effort.PARTS[0] or batch.target / part >= batch.fastest]


def _reserved(batch: Batch, makespan: float) -> Trial | None:
    blocks = _blocks(batch, makespan)
    placed = reserve(
        blocks,
        batch.lengths[blocks.items],
        num_ranks=batch.cluster.num_ranks,
        target=makespan,
        whole_seconds=batch.work_seconds[len(blocks.items) :],
        launch_seconds=batch.cost.micro_batch_seconds,
    )
    return None if placed is None else _filled(batch, blocks, placed)


def _stacked(batch: Batch, blocks: Rectangles, makespan: float, whole_slot: float = 0.0) -> Trial:
    free = stack(blocks, batch.cluster.num_ranks, target=makespan, num_stages=batch.num_stages, whole_slot=whole_slot)
    return _filled(batch, blocks, free.placement())


def _blocks(batch: Batch, longest: float) -> Rectangles:
    """Step 2: the sequences that are shared, which are the longest."""
    cluster, count = batch.cluster, batch.num_shared(longest)
    lengths, fewest = batch.lengths[:count], batch.fewest[:count]
    if cluster.is_uniform:
        return equal_blocks(batch.tried, lengths, fewest, longest)
    return unequal_blocks(batch.tried, lengths, fewest, longest, cluster)


def _filled(batch: Batch, blocks: Rectangles, placed: Placement) -> Trial:
    """Step 4. Of the sequences that are no blocks, some have become groups all the same (``place``)."""
    cluster, count = batch.cluster, len(blocks.items)
    others = np.arange(count, len(batch.lengths))
    shared = np.append(blocks.items, others)[placed.groups]
    whole = np.delete(others, placed.groups[placed.groups >= count] - count)
    # Where a pack is longer than the last shared group, it has bubbles of its own.
    bubbles = (batch.num_stages - 1) * np.maximum(batch.pack_seconds(count) - placed.last, 0.0)
    ranks, free_at = deal(
        batch.work_seconds[whole],
        placed.free_at + bubbles,
        speeds=None if cluster.is_uniform else cluster.speeds,
        lengths=None if cluster.is_uniform else batch.lengths[whole],
        capacity=None if cluster.is_uniform else cluster.capacity_tokens,
    )
    if batch.num_stages > 1:
        free_at = pipeline_ends(batch, placed, whole, ranks)
    return Trial(
        shared=shared,
        placed=placed,
        whole=whole,
        whole_ranks=ranks,
        end=float(free_at.max()),
        pack_tokens=batch.pack_tokens,
        traffic_tokens=int((batch.lengths[shared] * (placed.degrees - 1)).sum()),
    )


def _best_with_baselines(plan: Plan, batch: Batch) -> Plan:
    """Step 7: the best of ``plan`` and the baselines' plans, until one is good enough.

    With free communication, or of more than ``effort.FEW`` sequences, a plan is good enough from ``effort.GOOD_ENOUGH``
    times the target on. Otherwise only all compute spread evenly is: the target can be beaten, because the sequences of
    a mesh's pack hide each other's messages.
    """
    enough = float(batch.cost.work_seconds(batch.lengths).sum() / batch.cluster.speeds.sum())
    if is_ideal(batch.cost) or plan.num_sequences > effort.FEW:
        enough = effort.GOOD_ENOUGH * batch.target
    end = batch.step(plan)
    if end <= enough:
        return plan
    for candidate in baseline_plans(
        plan.lengths,
        cluster=batch.cluster,
        cost=batch.cost,
        context=batch.context,
        aligned=batch.num_stages > 1,
        in_order=batch.step_seconds is not None,
    ):
        candidate_end = batch.step(candidate)
        if candidate_end < end:
            plan, end = candidate, candidate_end
        if end <= enough:
            break
    return plan
