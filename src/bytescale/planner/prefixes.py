"""Which documents share prefixes: trees of them, as long as that pays, and a plan of the trees.

Documents are sorted by their rows; one that is a prefix of others comes behind them. Neighbours then have the longest
prefixes in common, and every subtree is a run of neighbours. Four things are decided here, by the cost model:

1. **Nodes.** A prefix is shared where computing it again would take longer than the blocks of attention that it adds,
   and than merging their results into the rows that see it (``LEAST_ROWS``, ``MERGED_SHARE``).
2. **Cuts.** Trees of more rows than a limit are cut at the branches that are nearest to the root, as few as possible.
   Each part computes the prefix again.
3. **The limit**: all ranks together, the capacity of one to three, an equal share of all rows, half of that, or nothing
   shared; the one whose plan ends first.
4. **Shares** of members that have a tree together: equal work, where equal rows would not be. Members hold segments
   from both ends of a sequence (``plan.layout``), whose attention is equal if every row sees all rows before it. A row
   of a tree sees its path alone. Whatever the tree, the work of its first and last h rows grows with h. So the shares
   are found from both ends to the middle: member by member, as far as its part of the group's work goes. A member gets
   more rows only as far as its capacity allows. In a ring, a member computes its own queries. In a grid of several
   columns, a row of members has equal work together; within it, work follows where the keys of the row's paths are.

Shape letters: D documents, S sequences, E members of all groups, P points at which work is known.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.common.errors import PlanError
from bytescale.cost.model import CostModel
from bytescale.plan import Plan
from bytescale.plan.plan import offsets_of, segment_sums
from bytescale.plan.slices import member_places, micro_batch_tokens
from bytescale.plan.trees import Forest, branches_of
from bytescale.planner.adaptive.effort import GOOD_ENOUGH
from bytescale.planner.evaluate import evaluate
from bytescale.planner.verified import VerifiedPlanner

LEAST_ROWS = 16
"""A node has to save as much time as so many tokens take, for the blocks that it adds."""
MERGED_SHARE = 1 / 32
"""And as much as this share of the tokens that see it: their results are merged once more."""
PARTS, POINTS = 2**24, 64
"""The sum of the weights of a group's members, and points for each of them, between which work is taken to be even."""


@dataclass(frozen=True, kw_only=True)
class Prefixes:
    """Documents in depth-first order, and what neighbours have in common."""

    order: IntArray  # [D] numbers of documents
    lengths: IntArray  # [D] tokens, in this order
    common: IntArray  # [D] first rows that each has in common with the one before it

    @staticmethod
    def of(rows: Sequence[bytes], row_bytes: int, labels: Sequence[Hashable] | None = None) -> Prefixes:
        """Sort documents.

        Args:
            rows: by document all its rows, ``row_bytes`` bytes each. Rows with equal bytes may be shared.
            labels: documents of one label alone share rows; None: all.
        """
        lengths = np.array([len(own) // row_bytes for own in rows], dtype=np.int64)
        numbers: dict[Hashable, int] = {}
        kinds = [0] * len(rows) if labels is None else [numbers.setdefault(one, len(numbers)) for one in labels]
        order = sorted(range(len(rows)), key=lambda at: (kinds[at], rows[at]), reverse=True)
        common = np.zeros(len(rows), dtype=np.int64)
        for place, (before, own) in enumerate(pairwise(order), start=1):
            if kinds[before] == kinds[own] and rows[before][:row_bytes] == rows[own][:row_bytes]:
                common[place] = _common_bytes(rows[before], rows[own]) // row_bytes
        return Prefixes(order=np.array(order, dtype=np.int64), lengths=lengths[order], common=common)

    def worthwhile(self, cost: CostModel) -> IntArray:
        """``[D]`` the rows in common that are shared because that saves time."""
        shared, rows = self.common.copy(), offsets_of(self.lengths - self.common)
        low, high, above = np.array([0]), np.array([len(shared)]), np.array([0])
        while (several := high - low > 1).any():
            low, high, above = low[several], high[several], above[several]
            position, starts, stops, subtree = branches_of(shared, low, high)
            counts = np.bincount(subtree)
            saved = (cost.work_seconds(position) - cost.work_seconds(above)) * (counts - 1)
            merged = LEAST_ROWS + MERGED_SHARE * (rows[high] - rows[low + 1])
            position = np.where(
                saved < cost.token_seconds * merged + cost.attention_block_seconds * counts, above, position
            )
            branches = starts != low[subtree]
            shared[starts[branches]] = position[subtree[branches]]
            low, high, above = starts, stops, position[subtree]
        return shared

    def forest(self, shared: IntArray, limit: int) -> Forest:
        """The trees in which documents share ``shared [D]`` rows, cut so that they have at most ``limit`` rows.

        Sequences are in the order of their lowest document. A document of more rows is a sequence alone.
        """
        shared, sums = shared.copy(), offsets_of(self.lengths - shared)
        behind = self.lengths - sums[1:]  # a tree of documents low .. high - 1 has behind[low] + sums[high] rows
        low = np.flatnonzero(shared == 0)
        high = np.append(low[1:], len(shared))
        while (large := (high - low > 1) & (behind[low] + sums[high] > limit)).any():
            _, starts, stops, subtrees = branches_of(shared, low[large], high[large])
            firsts, tree, room = list[int](), -1, 0
            for start, subtree, rows in zip(starts.tolist(), subtrees.tolist(), sums[stops].tolist(), strict=True):
                if subtree != tree or rows > room:
                    tree, room = subtree, limit - int(behind[start])
                    firsts.append(start)
            ends = np.append(firsts[1:], len(shared))
            trees = np.searchsorted(low[large], firsts, side="right") - 1
            low, high, whole = np.array(firsts), np.minimum(ends, high[large][trees]), low[large][trees]
            shared[low[low != whole]] = 0
        offsets = np.append(np.flatnonzero(shared == 0), len(shared))
        forest = Forest(self.order, self.lengths, shared, offsets)
        return forest.of(np.argsort(np.minimum.reduceat(self.order, offsets[:-1]), kind="stable"))


def plan_prefixes(
    planner: VerifiedPlanner, prefixes: Prefixes, labels: Sequence[Hashable] | None = None
) -> tuple[Plan, Forest | None]:
    """The plan that ends first, and the trees that are its sequences; None: no document shares anything.

    Args:
        labels: see ``VerifiedPlanner``, of documents in the batch's order.

    Raises ``PlanError`` if there is no plan.
    """
    cluster, cost = planner.cluster, planner.cost
    shared = prefixes.worthwhile(cost)
    even = -(-int((prefixes.lengths - shared).sum()) // cluster.num_ranks)
    capacity = int(cluster.capacity_tokens.min())
    limits = {cluster.room, even, -(-even // 2), 3 * capacity, 2 * capacity, capacity, 0}
    best: tuple[float, Plan, Forest] | None = None
    problem, largest, enough = None, np.inf, 0.0
    for limit in sorted(limits, reverse=True):
        if largest <= limit:
            continue  # nothing more would be cut
        forest = prefixes.forest(shared, limit)
        largest = forest.sequence_lengths[np.diff(forest.offsets) > 1].max(initial=0)
        own = replace(planner, cost=cost_of_trees(cost, forest))
        ideal = float(own.cost.work_seconds(forest.sequence_lengths).sum() / cluster.speeds.sum())
        enough = enough or GOOD_ENOUGH * ideal  # of the fewest rows
        if best is not None and best[0] <= max(enough, ideal):
            break
        of_sequences = None if labels is None else [labels[at] for at in forest.documents[forest.offsets[:-1]].tolist()]
        try:
            plan = own(forest.sequence_lengths, of_sequences)
        except PlanError as error:
            problem = error
            continue
        seconds = evaluate(plan, cluster=cluster, cost=own.cost, num_stages=planner.num_stages).end_seconds
        if best is None or seconds < best[0]:
            best = seconds, plan, forest
    if best is None:
        assert problem is not None, "documents apart are among the limits"
        raise problem
    _, plan, forest = best
    lengths = np.empty_like(prefixes.lengths)
    lengths[prefixes.order] = prefixes.lengths
    forest.verify(lengths)
    return plan, forest if forest.shared.any() else None


def cost_of_trees(cost: CostModel, forest: Forest | None) -> CostModel:
    """The cost model that knows the work of these trees, which have fewer pairs than documents as long as they are."""
    if forest is None or not forest.shared.any():
        return cost
    squares = segment_sums(cost.squares_of(forest.lengths) - cost.squares_of(forest.shared), forest.offsets)
    lengths, places, counts = np.unique(forest.sequence_lengths, return_inverse=True, return_counts=True)
    means = np.bincount(places, squares) / counts
    of_trees = np.unique(forest.sequence_lengths[np.diff(forest.offsets) > 1])
    known = np.searchsorted(lengths, of_trees)
    return replace(cost, tree_squares=tuple(zip(of_trees.tolist(), means[known].tolist(), strict=True)))


def with_equal_work(plan: Plan, forest: Forest, cost: CostModel) -> Plan:
    """The plan of the sequences of ``forest`` in which members of groups with trees have equal work, not equal rows.

    Members whose weights differ, because their ranks do, keep the ratios of their work.
    """
    weights, edges = plan.group_weights.copy(), plan.group_rank_offsets.tolist()
    trees = np.logical_or.reduceat(np.diff(forest.offsets)[plan.group_sequences] > 1, plan.group_sequence_offsets[:-1])
    tokens, free = micro_batch_tokens(plan), np.empty(len(plan.group_ranks))  # [E] tokens that a member may add
    room = plan.capacity_tokens[plan.micro_batch_ranks] - (tokens.held - tokens.offloaded)
    free[member_places(plan)] = np.repeat(room, np.diff(plan.micro_batch_group_offsets))
    for group in np.flatnonzero((plan.group_sizes > 1) & trees).tolist():
        members, sequences = slice(edges[group], edges[group + 1]), plan.sequences_of(group)
        before = weights[members] / weights[members].sum()
        points = np.linspace(0.0, 1.0, POINTS * len(before) + 1)
        work = work_from_both_ends(forest.of(sequences), cost, points)
        wanted = np.diff(np.interp(np.append(0.0, np.cumsum(before)) * work[-1], work, points))
        more = (wanted - before) * float(plan.lengths[sequences].sum())
        most = free[members] / (1.0 - plan.group_offload_ratio[group]) - len(sequences)  # each is rounded for itself
        part = np.divide(most, more, out=np.where(most < 0, 0.0, 1.0), where=more > 0).clip(0.0, 1.0).min()
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
    for first, last in pairwise(sums[trees.offsets].tolist()):
        half = points * (last - first) / 2
        total += up_to(first + half) - up_to(last - half)
    return total - total[0]


def _common_bytes(first: bytes, second: bytes) -> int:
    count = min(len(first), len(second))
    differs = np.frombuffer(first, np.uint8, count) != np.frombuffer(second, np.uint8, count)
    return int(differs.argmax()) if differs.any() else count
