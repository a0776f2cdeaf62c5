"""A plan in words."""

from __future__ import annotations

from collections import Counter

import numpy as np

from bytescale.common.units import format_count
from bytescale.plan.plan import Plan

_MOST_SHAPES = 8
"""Shapes of groups that ``gist`` names. Smaller ones are summed up."""


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
