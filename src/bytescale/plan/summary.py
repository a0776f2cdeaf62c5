"""A plan in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from bytescale.common.units import format_count
from bytescale.plan.plan import Plan

_MOST_SHAPES = 8
"""Shapes of groups that ``gist`` names. Smaller ones are summed up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """The facts about a plan that every rank reports without holding the whole plan."""

    num_tokens: int
    num_sequences: int
    group_sizes: dict[int, int]
    """Slice groups per degree, largest degree first; degree 1 counts local packs."""
    gist: str
    """One line for people."""

    @staticmethod
    def of(plan: Plan) -> PlanSummary:
        return PlanSummary(
            num_tokens=plan.num_tokens,
            num_sequences=plan.num_sequences,
            group_sizes=dict(sorted(Counter(plan.group_sizes.tolist()).items(), reverse=True)),
            gist=gist(plan),
        )


def gist(plan: Plan) -> str:
    """One line that describes the batch and how it is distributed over the ranks."""
    shared_sequences = int((np.diff(plan.group_sequence_offsets) * (plan.group_sizes > 1)).sum())
    micro_batches = np.diff(plan.rank_micro_batch_offsets)
    longest = format_count(int(plan.lengths.max())) if plan.num_sequences else "0"
    shared = plan.group_sizes > 1
    counts = Counter(zip(plan.group_sizes[shared].tolist(), plan.group_columns[shared].tolist(), strict=True))
    shapes = sorted(counts.items(), reverse=True)  # widest first
    groups = ", ".join(
        f"{count} over {degree} ranks" + (f" ({degree // columns} rows x {columns})" if columns > 1 else "")
        for (degree, columns), count in shapes[:_MOST_SHAPES]
    )
    if rest := shapes[_MOST_SHAPES:]:
        groups += f", {sum(count for _, count in rest)} over {rest[-1][0][0]} to {rest[0][0][0]}"
    least, most = int(micro_batches.min()), int(micro_batches.max())
    return (
        f"{plan.num_sequences} sequences of {format_count(plan.num_tokens)} tokens (longest {longest}) on "
        f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''} by {plan.planner}: "
        f"{plan.num_sequences - shared_sequences} whole on one rank, {shared_sequences} shared"
        + (f" in slice groups ({groups}); " if groups else "; ")
        + (f"{least} to {most} micro-batches a rank" if least < most else f"micro-batches a rank: {most}")
        + (f", in lockstep by {plan.domain} ranks" if plan.domain > 1 else "")
    )
