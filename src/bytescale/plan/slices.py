"""How many tokens of each group each rank holds, and the sum per micro-batch: array arithmetic for whole plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.plan.plan import Plan, concatenated_ranges, segment_sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanTokens:
    """Tokens of every micro-batch of a plan, ``[M]`` each."""

    held: IntArray
    offloaded: IntArray  # the part of ``held`` that is in host memory between forward and backward
    shared: IntArray  # the part of ``held`` in slices of shared groups
    row: IntArray  # of the slices of the other columns in a grid, as if all were as long as this rank's


def micro_batch_tokens(plan: Plan) -> PlanTokens:
    """Tokens that each micro-batch holds, offloads and shares, exactly."""
    offsets, groups = plan.micro_batch_group_offsets, plan.micro_batch_groups
    shared = (plan.group_sizes > 1)[groups]
    held = plan.group_tokens[groups].copy()
    held[shared] = slice_tokens(plan, np.flatnonzero(shared))
    moved = np.floor(held * plan.group_offload_ratio[groups] + 1e-9).astype(np.int64)
    return PlanTokens(
        held=segment_sums(held, offsets),
        offloaded=segment_sums(moved, offsets),
        shared=segment_sums(np.where(shared, held, 0), offsets),
        row=segment_sums(np.where(shared, held, 0) * (plan.group_columns[groups] - 1), offsets),
    )


def largest_slice(plan: Plan) -> IntArray:
    """``[G]`` upper bound of the tokens that a member of each group holds.

    With equal weights the last member holds exactly this many.
    """
    sizes = plan.group_sizes
    weight_sums = segment_sums(plan.group_weights, plan.group_rank_offsets)
    heaviest = np.maximum.reduceat(plan.group_weights, plan.group_rank_offsets[:-1]) if len(sizes) else weight_sums
    repeats = np.diff(plan.group_sequence_offsets)
    per_sequence = -(
        -plan.lengths[plan.group_sequences] * np.repeat(heaviest, repeats) // np.repeat(weight_sums, repeats)
    )
    return segment_sums(per_sequence, plan.group_sequence_offsets)


def member_places(plan: Plan) -> IntArray:
    """``[E]`` place in ``group_ranks`` of each (micro-batch, group) pair, found by sorting both by (group, rank)."""
    ranks = np.repeat(plan.micro_batch_ranks, np.diff(plan.micro_batch_group_offsets))
    by_entry = np.argsort(plan.micro_batch_groups * plan.num_ranks + ranks, kind="stable")
    groups = np.repeat(np.arange(plan.num_groups), plan.group_sizes)
    by_member = np.argsort(groups * plan.num_ranks + plan.group_ranks, kind="stable")
    places = np.empty(len(by_entry), dtype=np.int64)
    places[by_entry] = by_member
    return places


def slice_tokens(plan: Plan, entries: IntArray) -> IntArray:
    """Tokens that its rank holds of each of some (micro-batch, group) pairs, as ``layout.member_tokens`` cuts them."""
    if len(entries) == 0:
        return np.zeros(0, dtype=np.int64)
    groups, member = plan.micro_batch_groups[entries], member_places(plan)[entries]
    edges = np.zeros(len(plan.group_weights) + 1, dtype=np.int64)
    np.cumsum(plan.group_weights, out=edges[1:])
    starts, stops = plan.group_rank_offsets[groups], plan.group_rank_offsets[groups + 1]
    lower, upper, whole = edges[member] - edges[starts], edges[member + 1] - edges[starts], edges[stops] - edges[starts]
    first, last = plan.group_sequence_offsets[groups], plan.group_sequence_offsets[groups + 1]
    lengths = plan.lengths[plan.group_sequences[concatenated_ranges(first, last)]]
    counts = last - first
    cut = [lengths * np.repeat(edge, counts) // np.repeat(whole, counts) for edge in (lower, upper)]
    offsets = np.concatenate(([0], np.cumsum(counts)))
    return segment_sums(cut[1] - cut[0], offsets)
