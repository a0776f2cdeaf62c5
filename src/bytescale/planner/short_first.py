"""Plans in which short sequences come first, for prefill: a prompt's first token waits for whatever runs before.

Planners place long sequences first and fill up with short ones, in packs as large as a rank holds. Two steps turn that
round (``short_first``).

1. The plan is run backwards in time (``backwards``), which ends at the same time or earlier. The groups' total order is
   reversed as a whole, so no two ranks wait for each other.
2. Packs are cut, shortest sequences first, into micro-batches that are as short as their fixed cost allows
   (``cut_packs``).

Shape letters: G groups, M micro-batches of all ranks, R ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.cost.model import CostModel
from bytescale.plan import Plan
from bytescale.plan.plan import concatenated_ranges, offsets_of

LEAST_WORK = 50
"""Work of a micro-batch that is cut from a pack, in fixed costs of a micro-batch: cutting adds 2 % at most."""


def short_first(plan: Plan, cost: CostModel) -> Plan:
    """Return ``plan`` with short sequences first, at a makespan that is at most ``1 / LEAST_WORK`` longer."""
    return cut_packs(backwards(plan), cost)


def backwards(plan: Plan) -> Plan:
    """Return the plan in which every rank runs the micro-batches of ``plan`` in the opposite order."""
    groups = np.arange(plan.num_groups)[::-1]
    ranks = plan.rank_micro_batch_offsets
    of_ranks = np.repeat(ranks[:-1] + ranks[1:] - 1, np.diff(ranks))
    micro_batches = of_ranks - np.arange(plan.num_micro_batches)  # [M] the old number of each new one
    group_sequences, sequence_offsets = _taken(plan.group_sequences, plan.group_sequence_offsets, groups)
    group_ranks, rank_offsets = _taken(plan.group_ranks, plan.group_rank_offsets, groups)
    weights, _ = _taken(plan.group_weights, plan.group_rank_offsets, groups)
    of_micro_batches, offsets = _taken(plan.micro_batch_groups, plan.micro_batch_group_offsets, micro_batches)
    return replace(
        plan,
        group_sequences=group_sequences,
        group_sequence_offsets=sequence_offsets,
        group_ranks=group_ranks,
        group_rank_offsets=rank_offsets,
        group_weights=weights,
        group_columns=plan.group_columns[groups],
        group_offload_ratio=plan.group_offload_ratio[groups],
        micro_batch_group_offsets=offsets,
        micro_batch_groups=plan.num_groups - 1 - of_micro_batches,
    )


def cut_packs(plan: Plan, cost: CostModel) -> Plan:
    """Cut packs of whole sequences that fill a micro-batch into several, shortest sequences first."""
    alone = np.diff(plan.micro_batch_group_offsets) == 1
    first = plan.micro_batch_groups[plan.micro_batch_group_offsets[:-1]]
    may_cut = np.zeros(plan.num_groups, dtype=bool)
    may_cut[first[alone]] = plan.group_sizes[first[alone]] == 1
    # 1. Number the pieces of every pack: a new one begins where the work before it reaches a multiple of the least.
    counts = np.diff(plan.group_sequence_offsets)
    group = np.repeat(np.arange(plan.num_groups), counts)
    lengths = np.where(may_cut[group], plan.lengths[plan.group_sequences], 0)
    order = np.lexsort((lengths, group))  # stable: groups that are not cut keep their order
    work = np.cumsum(cost.work_seconds(plan.lengths[plan.group_sequences[order]]))
    before = np.concatenate(([0.0], work))[:-1]
    before -= np.repeat(before[plan.group_sequence_offsets[:-1]], counts)
    least = max(LEAST_WORK * cost.micro_batch_seconds, 1e-30)
    begins = np.diff(np.floor(before / least), prepend=-1.0) != 0
    begins &= may_cut[group]
    begins[plan.group_sequence_offsets[:-1]] = True
    heads = np.flatnonzero(begins)
    # 2. Every piece is a group; the pieces of a pack are micro-batches, one after the other.
    old = group[heads]
    pieces = np.bincount(old, minlength=plan.num_groups)
    first_piece = np.cumsum(pieces) - pieces
    ranks, rank_offsets = _taken(plan.group_ranks, plan.group_rank_offsets, old)
    weights, _ = _taken(plan.group_weights, plan.group_rank_offsets, old)
    per_entry = pieces[plan.micro_batch_groups]
    items = concatenated_ranges(first_piece[plan.micro_batch_groups], first_piece[plan.micro_batch_groups] + per_entry)
    per_micro_batch = np.where(alone, pieces[first], 1)  # new micro-batches of each old one
    sizes = np.repeat(np.where(alone, 1, np.diff(plan.micro_batch_group_offsets)), per_micro_batch)
    through = offsets_of(per_micro_batch)
    return replace(
        plan,
        group_sequences=plan.group_sequences[order],
        group_sequence_offsets=np.append(heads, plan.num_sequences),
        group_ranks=ranks,
        group_rank_offsets=rank_offsets,
        group_weights=weights,
        group_columns=plan.group_columns[old],
        group_offload_ratio=plan.group_offload_ratio[old],
        rank_micro_batch_offsets=through[plan.rank_micro_batch_offsets],
        micro_batch_group_offsets=offsets_of(sizes),
        micro_batch_groups=items,
    )


def _taken(items: NDArray, offsets: IntArray, order: IntArray) -> tuple[NDArray, IntArray]:
    """CSR runs in another order: their items, and their offsets."""
    places = concatenated_ranges(offsets[:-1][order], offsets[1:][order])
    return items[places], offsets_of(np.diff(offsets)[order])
