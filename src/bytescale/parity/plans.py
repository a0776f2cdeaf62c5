"""Random valid plans: any group size and shape, any member order, any filling, any number of micro-batches a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec
from bytescale.planner import align


def random_plan(lengths: Sequence[int], num_ranks: int, seed: int, *, weighted: bool = False, domain: int = 1) -> Plan:
    """A plan that respects every rule except that capacity is whatever it takes.

    Sequences are thrown together into groups of random ranks in random member order, with a random shape. Local groups
    join the micro-batches of shared ones or get their own, wherever they fall. For lockstep domains, which equal shares
    are needed for, the plan is aligned.
    """
    random = np.random.default_rng(seed)
    sequences = random.permutation(len(lengths))
    cuts = np.sort(random.integers(0, len(lengths) + 1, size=random.integers(0, len(lengths) + 1)))
    groups: list[GroupSpec] = []
    for members in np.split(sequences, cuts):
        if not len(members):
            continue
        size = int(random.integers(1, num_ranks + 1))
        ranks = random.permutation(num_ranks)[:size].tolist()
        weights = random.integers(1, 5, size).tolist() if weighted else ()
        columns = int(random.choice([columns for columns in range(1, size + 1) if size % columns == 0]))
        groups.append(GroupSpec(sequences=members.tolist(), ranks=ranks, weights=weights, columns=columns))
    schedule: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for number, group in enumerate(groups):
        for rank in group.ranks:
            micro_batches = schedule[rank]
            local = len(group.ranks) == 1
            if local and micro_batches and random.random() < 0.5:
                micro_batches[int(random.integers(len(micro_batches)))].append(number)
            else:
                micro_batches.append([number])
    # A local group may be what a later shared group joins: the shared one goes first in the micro-batch.
    for rank in range(num_ranks):
        schedule[rank] = _merge_some_locals(schedule[rank], groups, random)
    capacity = int(np.sum(lengths))
    plan = Plan.build(
        lengths=lengths,
        capacity_tokens=[capacity] * num_ranks,
        groups=groups,
        schedule=schedule,
        planner="random",
    )
    if domain > 1:
        plan = align(plan, cluster=Cluster.uniform(num_ranks, capacity), cost=CostModel.from_work())
    return replace(plan, domain=domain)


def _merge_some_locals(
    micro_batches: list[list[int]], groups: list[GroupSpec], random: np.random.Generator
) -> list[list[int]]:
    merged: list[list[int]] = []
    for micro_batch in micro_batches:
        previous_is_local = bool(merged) and all(len(groups[group].ranks) == 1 for group in merged[-1])
        if previous_is_local and random.random() < 0.5:
            merged[-1] = micro_batch + merged[-1]
        else:
            merged.append(micro_batch)
    return merged
