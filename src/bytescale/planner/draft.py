"""Turns a planner's decisions into a ``Plan``.

Each group gets a **slot**, a whole number that is its place in time on all ranks: groups numbered by slot are in the
plan's total order. Groups of equal slot on one rank form one micro-batch; at most one of them is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.cost.cluster import Cluster
from bytescale.plan import Plan
from bytescale.plan.plan import concatenated_ranges, offsets_of
from bytescale.planner.batch import rising


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """Groups in any order, as CSR runs. Shape letters: S sequences, G groups, E = sum of degrees."""

    sequences: IntArray  # [S] sequence numbers, group by group
    sequence_counts: IntArray  # [G]
    ranks: IntArray  # [E] ranks, group by group, in member order
    degrees: IntArray  # [G]
    slots: IntArray  # [G] place in time
    weights: IntArray | None = None  # [E] shares of the members; None: all equal
    columns: IntArray | None = None  # [G] columns of each group's grid; None: all are rings


def assemble(draft: Draft, *, lengths: IntArray, cluster: Cluster, planner: str) -> Plan:
    """The ``Plan`` of a draft. Groups are numbered by slot; in a slot, shared groups come before local ones."""
    draft = _in_order(draft)
    sequences, counts, degrees, ranks = draft.sequences, draft.sequence_counts, draft.degrees, draft.ranks
    # The groups are in order, so a stable sort by rank gives every rank's schedule.
    by_rank = rising(ranks)
    entry_ranks = ranks[by_rank]
    entry_groups = np.repeat(np.arange(len(degrees)), degrees)[by_rank]
    entry_slots = draft.slots[entry_groups]
    starts = np.ones(len(by_rank), dtype=bool)
    starts[1:] = (entry_ranks[1:] != entry_ranks[:-1]) | (entry_slots[1:] != entry_slots[:-1])
    first_entries = np.flatnonzero(starts)
    return Plan(
        lengths=lengths,
        capacity_tokens=cluster.capacity_tokens,
        group_sequence_offsets=offsets_of(counts),
        group_sequences=sequences,
        group_rank_offsets=offsets_of(degrees),
        group_ranks=ranks,
        group_weights=np.ones(len(ranks), dtype=np.int64) if draft.weights is None else draft.weights,
        group_columns=np.ones(len(degrees), dtype=np.int64) if draft.columns is None else draft.columns,
        group_offload_ratio=_offload_ratios(draft, lengths, cluster),
        rank_micro_batch_offsets=offsets_of(np.bincount(entry_ranks[first_entries], minlength=cluster.num_ranks)),
        micro_batch_group_offsets=np.append(first_entries, len(by_rank)),
        micro_batch_groups=entry_groups,
        planner=planner,
    )


def _in_order(draft: Draft) -> Draft:
    """The same groups, ordered by slot; in a slot, shared groups come first."""
    keys = draft.slots * 2 + (draft.degrees == 1)
    if (keys[1:] >= keys[:-1]).all():
        return draft
    order = rising(keys)
    members = _runs(draft.degrees, order)
    return Draft(
        sequences=draft.sequences[_runs(draft.sequence_counts, order)],
        sequence_counts=draft.sequence_counts[order],
        ranks=draft.ranks[members],
        degrees=draft.degrees[order],
        slots=draft.slots[order],
        weights=None if draft.weights is None else draft.weights[members],
        columns=None if draft.columns is None else draft.columns[order],
    )


def _offload_ratios(draft: Draft, lengths: IntArray, cluster: Cluster) -> NDArray[np.float64]:
    """``[G]`` smallest offload ratio r with which each group's slices fit (0 unless the cluster offloads)."""
    degrees, counts = draft.degrees, draft.sequence_counts
    if cluster.offload is None or len(degrees) == 0:
        return np.zeros(len(degrees))
    parts = -(-lengths[draft.sequences] // np.repeat(degrees, counts))
    slices = np.add.reduceat(parts, np.cumsum(counts) - counts)
    return cluster.offload.ratio(slices, int(cluster.capacity_tokens.min()))


def in_member_order(ranks: IntArray, degrees: IntArray, columns: IntArray, down: NDArray[np.bool_]) -> IntArray:
    """``[E]`` the ranks of all groups in member order, which goes row by row through a grid.

    In ``ranks [E]``, group by group, neighbours are beside each other. ``down [G]``: whether these stand below each
    other in a column of the group's grid; if not, side by side in a row.
    """
    ordered, starts = ranks.copy(), np.cumsum(degrees) - degrees
    for group in np.flatnonzero(down).tolist():
        members = slice(int(starts[group]), int(starts[group] + degrees[group]))
        ordered[members] = ranks[members].reshape(int(columns[group]), -1).T.ravel()
    return ordered


def _runs(counts: IntArray, order: IntArray) -> IntArray:
    """Places of the items of CSR runs when the runs are taken in ``order``."""
    starts = np.cumsum(counts) - counts
    return concatenated_ranges(starts[order], starts[order] + counts[order])
