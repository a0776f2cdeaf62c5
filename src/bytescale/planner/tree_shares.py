"""Shares of the members of groups that have trees: equal work, where equal rows would not be.

Members hold segments from both ends of a sequence (``plan.layout``), whose attention is equal if every row sees all
rows before it. A row of a tree sees its path alone. Whatever the tree, the work of its first and last h rows grows with
h. So the shares are found from both ends to the middle: member by member, as far as its part of the group's work goes.
A member gets more rows than before only as far as its capacity allows.

In a ring, a member computes its own queries, so its work is known. In a grid of several columns, a row of members has
equal work together, and its members have as much of it as their columns have keys of the row's paths.

Shape letters: G groups, N members of a group, K sequences of a group, P points at which work is known.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bytescale.common.arrays import FloatArray
from bytescale.cost import CostModel
from bytescale.plan import Plan
from bytescale.plan.plan import offsets_of
from bytescale.plan.slices import member_places, micro_batch_tokens
from bytescale.plan.trees import Forest

PARTS = 2**24
"""The sum of a group's weights, which are whole numbers."""
POINTS = 64
"""Points for each member. Work between two of them is taken to be even."""


def with_equal_work(plan: Plan, forest: Forest, cost: CostModel) -> Plan:
    """The plan of the sequences of ``forest`` in which members of groups with trees have equal work, not equal rows.

    Members whose weights differ, because their ranks do, keep the ratios of their work.
    """
    weights, edges = plan.group_weights.copy(), plan.group_rank_offsets.tolist()
    trees = np.logical_or.reduceat(np.diff(forest.offsets)[plan.group_sequences] > 1, plan.group_sequence_offsets[:-1])
    free = _free_tokens(plan)
    for group in np.flatnonzero((plan.group_sizes > 1) & trees).tolist():
        members, sequences = slice(edges[group], edges[group + 1]), plan.sequences_of(group)
        before = weights[members] / weights[members].sum()
        points = np.linspace(0.0, 1.0, POINTS * len(before) + 1)
        work = work_from_both_ends(forest.of(sequences), cost, points)
        wanted = np.diff(np.interp(np.append(0.0, np.cumsum(before)) * work[-1], work, points))
        more = (wanted - before) * float(plan.lengths[sequences].sum())
        room = free[members] / (1.0 - plan.group_offload_ratio[group]) - len(sequences)  # each is rounded for itself
        part = np.divide(room, more, out=np.where(room < 0, 0.0, 1.0), where=more > 0).clip(0.0, 1.0).min()
        cuts = np.rint(PARTS * np.cumsum(before + part * (wanted - before)))
        if part > 0:
            weights[members] = np.maximum(1, np.diff(cuts, prepend=0.0))
    return replace(plan, group_weights=weights)


def work_from_both_ends(trees: Forest, cost: CostModel, points: FloatArray) -> FloatArray:
    """``[P]`` seconds of the first and last rows of sequences, as much of each as ``points [P]`` says; 1: all of it.

    A document adds the work of its whole length beyond that of the prefix that it shares.
    """
    sums = offsets_of(trees.lengths - trees.shared)
    added = np.append(0.0, np.cumsum(cost.work_seconds(trees.lengths) - cost.work_seconds(trees.shared)))

    def up_to(rows: FloatArray) -> FloatArray:
        at = np.minimum(np.searchsorted(sums, rows, side="right") - 1, len(trees.lengths) - 1)
        shared = trees.shared[at]
        return added[at] + cost.work_seconds(shared + rows - sums[at]) - cost.work_seconds(shared)

    total = np.zeros(len(points))
    for first, last in zip(*(sums[trees.offsets[side]].tolist() for side in (slice(-1), slice(1, None))), strict=True):
        half = points * (last - first) / 2
        total += up_to(first + half) - up_to(last - half) + up_to(np.array([last])) - up_to(np.array([first]))
    return total


def _free_tokens(plan: Plan) -> FloatArray:
    """``[E]`` tokens for which each member, group by group, has room besides those of its micro-batch."""
    tokens, counts = micro_batch_tokens(plan), np.diff(plan.micro_batch_group_offsets)
    room = plan.capacity_tokens[plan.micro_batch_ranks] - (tokens.held - tokens.offloaded)
    free = np.empty(len(plan.group_ranks))
    free[member_places(plan)] = np.repeat(room, counts)
    return free
