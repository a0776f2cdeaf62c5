"""Plans that keep certain sequences together: in one micro-batch of one group, for losses that look at all of them.

Sequences of one label are joined, planned as one sequence of all their tokens, and taken apart again. A member of a
group may hold one token per part more than of the joined sequence. Where that exceeds its capacity, sequences are
planned a little longer than they are.

Shape letters: S sequences, J joined ones, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.common.errors import PlanError
from bytescale.plan import Plan
from bytescale.plan.plan import concatenated_ranges, offsets_of


def plan_together(
    planner: Callable[[IntArray], Plan], lengths: IntArray, labels: Sequence[Hashable], check: Callable[[Plan], None]
) -> Plan:
    """Plan so that sequences of one label are in one micro-batch of one group.

    Args:
        planner: from lengths to a plan.
        lengths: ``[S]`` tokens.
        labels: ``[S]``; sequences with equal ones stay together.
        check: raises ``PlanError`` for a plan that breaks a rule.

    Raises ``PlanError`` if the labels are not as many as the sequences, or the sequences of a label do not fit.
    """
    if len(labels) != len(lengths):
        raise PlanError(
            f"{len(labels)} labels say which of {len(lengths)} documents stay together",
            fix="give one label for each document",
        )
    numbers: dict[Hashable, int] = {}
    joined = np.array([numbers.setdefault(label, len(numbers)) for label in labels], dtype=np.int64)
    if len(numbers) == len(lengths):
        return planner(lengths)
    order = np.argsort(joined, kind="stable")
    counts = np.bincount(joined)
    sums = np.bincount(joined, weights=lengths).astype(np.int64)
    plan = _taken_apart(planner(sums), lengths, order, counts)
    try:
        check(plan)
    except PlanError:
        plan = _taken_apart(planner(sums + (counts - 1) * plan.num_ranks), lengths, order, counts)
        check(plan)
    return plan


def _taken_apart(plan: Plan, lengths: IntArray, order: IntArray, counts: IntArray) -> Plan:
    """The plan of joined sequences as a plan of ``order``, which has ``counts [J]`` sequences of each, in turn."""
    offsets = offsets_of(counts)
    starts, stops = offsets[plan.group_sequences], offsets[plan.group_sequences + 1]
    per_group = offsets_of(stops - starts)[plan.group_sequence_offsets]
    sequences = order[concatenated_ranges(starts, stops)]
    return replace(plan, lengths=lengths, group_sequences=sequences, group_sequence_offsets=per_group)
