"""Plans that cannot hang in a pipeline: the members of every shared group meet at the same micro-batch index.

This is sufficient under 1F1B: an action's time on one clock (``plan.schedule.action_times``) is
later than that of everything that it may wait for, and the members of a group have it at the same time.
``plan.pipeline_order`` finds the circles of plans that are not aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.plan import Plan
from bytescale.plan.nodes import alignment
from bytescale.plan.plan import concatenated_ranges, segment_sums
from bytescale.planner.adaptive.degrees import Rectangles, block_seconds, is_ideal
from bytescale.planner.adaptive.fill import deal
from bytescale.planner.adaptive.place import stack
from bytescale.planner.draft import Draft, assemble, in_member_order


def is_aligned(plan: Plan) -> bool:
    """Whether all members of every shared group have the group at the same micro-batch index."""
    return not len(plan.apart())


def aligned(planner: Callable[..., Plan]) -> Callable[..., Plan]:
    """Return a planner whose plans are those of ``planner`` after ``align``."""

    def plan(lengths: ArrayLike, *, cluster: Cluster, cost: CostModel, **given: Any) -> Plan:
        return align(planner(lengths, cluster=cluster, cost=cost, **given), cluster=cluster, cost=cost)

    return plan


def _never_grows(group: int, first: int, most: int, room: float | None) -> tuple[int, float]:
    raise AssertionError(f"group {group} is late for no target: first {first}, most {most}, room {room}")


def align(plan: Plan, *, cluster: Cluster, cost: CostModel) -> Plan:
    """Return ``plan`` if it is aligned, else a plan with the same groups on other ranks.

    1. Shared groups, widest first, are stacked on blocks of consecutive ranks (``stack``): a block stands on a single
       other block, or on none, so all its ranks have the same groups below it.
    2. Local groups follow, longest first, each on the rank that is free first. Each is a micro-batch.

    Args:
        plan: from any planner that gives all members of a group equal shares.
        cluster: the plan's ranks, taken as equally fast. Where they differ, the smallest capacity has to hold all.
    """
    if is_aligned(plan):
        return plan
    assert bool((plan.group_weights == 1).all()), "unequal shares belong to their ranks: such plans cannot be moved"
    squares = segment_sums(cost.squares_of(plan.lengths[plan.group_sequences]), plan.group_sequence_offsets)
    shared, local = np.flatnonzero(plan.group_sizes > 1), np.flatnonzero(plan.group_sizes == 1)
    shared = shared[np.lexsort((-plan.group_tokens[shared], -plan.group_sizes[shared]))]
    degrees = plan.group_sizes[shared]
    node = 1 if is_ideal(cost) else cost.ranks_per_node
    taken = block_seconds(cost, plan.group_tokens[shared], degrees)
    blocks = Rectangles(np.arange(len(shared)), degrees, taken, _never_grows, (), node)
    placed = stack(blocks, plan.num_ranks, target=float(taken.sum())).placement()
    shared, degrees = shared[placed.groups], placed.degrees
    seconds = cost.compute_seconds(plan.group_tokens[local], squares[local]) + cost.micro_batch_seconds
    longest_first = np.argsort(-seconds, kind="stable")
    local = local[longest_first]
    local_ranks, _ = deal(seconds[longest_first], placed.free_at)
    groups = np.concatenate((shared, local))
    offsets = plan.group_sequence_offsets
    columns = plan.group_columns[shared]
    runs = alignment(placed.ranks, degrees, ranks_per_node=cost.ranks_per_node)
    is_wide = degrees > cost.ranks_per_node
    shape = cost.shape_seconds(plan.group_tokens[shared], squares[shared], degrees, columns, is_wide, runs)
    shared_ranks = in_member_order(placed.ranks, degrees, columns, shape.down)
    draft = Draft(
        sequences=plan.group_sequences[concatenated_ranges(offsets[groups], offsets[groups + 1])],
        sequence_counts=np.diff(offsets)[groups],
        ranks=np.concatenate((shared_ranks, local_ranks)),
        degrees=plan.group_sizes[groups],
        slots=np.arange(len(groups)),
        columns=plan.group_columns[groups],
    )
    return assemble(draft, lengths=plan.lengths, cluster=cluster, planner=f"{plan.planner}/aligned")
