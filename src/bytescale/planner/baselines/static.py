"""The baseline: a static mesh of data and context parallelism (paper section 3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from bytescale.common.errors import PlanError
from bytescale.cost import Cluster, CostModel
from bytescale.plan import Plan
from bytescale.plan.rank_plan import concatenated_ranges
from bytescale.planner.batch import checked_lengths, longest_first
from bytescale.planner.draft import Draft, assemble
from bytescale.planner.packing import best_fit, grouped


def static_plan(
    lengths: ArrayLike, *, cluster: Cluster, cost: CostModel | None = None, cp: int | None = None, context: int = 0
) -> Plan:
    """Pack sequences to the context length, and shard every sequence of a pack over all ranks of one mesh row.

    1. The mesh has R / cp rows of ``cp`` consecutive ranks.
    2. Sequences are packed, longest first by best fit, into packs of cp * C tokens. A sequence counts as
       ``ceil(s / cp)`` tokens on every rank, its largest slice.
    3. Packs are assigned to the rows in turn.

    Args:
        lengths: ``[S]`` tokens per sequence.
        cluster: the ranks; the smallest capacity limits all of them.
        cost: ignored; it is a parameter so that all planners are called alike.
        cp: context-parallel degree, a divisor of R; None: the smallest that holds the context.
        context: longest sequence that the mesh has to hold, if it is longer than the batch's longest.

    Raises:
        PlanError: for an impossible batch or a ``cp`` that does not divide R or cannot hold the longest sequence.
    """
    del cost
    lengths = checked_lengths(lengths, cluster=cluster, uniform=True)
    num_ranks, capacity, longest = cluster.num_ranks, int(cluster.capacity_tokens.min()), int(lengths.max())
    if cp is None:
        divisors = (cp for cp in range(1, num_ranks + 1) if num_ranks % cp == 0)
        cp = next((cp for cp in divisors if cp * capacity >= max(longest, context)), num_ranks)
    if cp < 1 or num_ranks % cp:
        raise PlanError(
            f"cp = {cp} does not divide the {num_ranks} ranks",
            so="the mesh would have a hole",
            fix="use a divisor, or the adaptive planner, which needs none",
        )
    if cp * capacity < longest:
        raise PlanError(
            f"a sequence of {longest} tokens exceeds cp = {cp} x {capacity} tokens",
            so="no row of the mesh could hold it",
            fix=f"raise cp to at least {-(-longest // capacity)}",
        )
    order = longest_first(lengths)
    packs = best_fit(-(-lengths[order] // cp), capacity)
    sequences, counts = grouped(order, packs)
    number, degrees = np.arange(len(counts)), np.full(len(counts), cp)
    first = number % (num_ranks // cp) * cp
    draft = Draft(
        sequences=sequences,
        sequence_counts=counts,
        ranks=concatenated_ranges(first, first + cp),
        degrees=degrees,
        slots=number,
    )
    return assemble(draft, lengths=lengths, cluster=cluster, planner=f"static/cp{cp}")
