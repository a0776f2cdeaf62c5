"""Which documents share prefixes: trees of them, as long as that pays, and a plan of the trees.

Documents are sorted by their rows; one that is a prefix of others comes behind them. Neighbours then have the longest
prefixes in common, and every subtree is a run of neighbours. Three things are decided here, by the cost model:

1. **Nodes.** A prefix is shared where computing it again would take longer than the blocks of attention that it adds,
   and than merging their results into the rows that see it (``LEAST_ROWS``, ``MERGED_SHARE``).
2. **Cuts.** Trees of more rows than a limit are cut at the branches that are nearest to the root, as few as possible.
   Each part computes the prefix again.
3. **The limit**: all ranks together, one rank's capacity, an equal share of all rows, half of that, or nothing shared;
   the one whose plan ends first.

Shape letters: D documents, S sequences.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.common.errors import PlanError
from bytescale.cost import CostModel
from bytescale.plan import Plan
from bytescale.plan.plan import offsets_of, segment_sums
from bytescale.plan.trees import Forest, branches_of
from bytescale.planner.adaptive.effort import GOOD_ENOUGH
from bytescale.planner.evaluate import evaluate
from bytescale.planner.verified import VerifiedPlanner

LEAST_ROWS = 16
"""A node has to save as much time as so many tokens take, for the blocks that it adds."""
MERGED_SHARE = 1 / 32
"""And as much as this share of the tokens that see it: their results are merged once more."""


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
            parts, tree, room = branches_of(shared, low[large], high[large]), -1, 0
            starts, subtrees, firsts = parts.low.tolist(), parts.subtree.tolist(), list[int]()
            for start, subtree, rows in zip(starts, subtrees, sums[parts.high].tolist(), strict=True):
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
    planner: VerifiedPlanner,
    prefixes: Prefixes,
    labels: Sequence[Hashable] | None = None,
    window: int | None = None,
) -> tuple[Plan, Forest | None]:
    """The plan that ends first, and the trees that are its sequences; None: no document shares anything.

    Args:
        labels: see ``VerifiedPlanner``, of documents in the batch's order.
        window: the shortest of the model; None: there is none. With longer documents, trees are whole on one rank.

    Raises ``PlanError`` if there is no plan.
    """
    cluster, cost = planner.cluster, planner.cost
    shared = prefixes.worthwhile(cost)
    even = -(-int((prefixes.lengths - shared).sum()) // cluster.num_ranks)
    limits = {cluster.room, int(cluster.capacity_tokens.min()), even, -(-even // 2), 0}
    best: tuple[float, Plan, Forest] | None = None
    problem, before, enough = None, None, 0.0
    for limit in sorted(limits, reverse=True):
        forest = prefixes.forest(shared, limit)
        if before is not None and np.array_equal(forest.shared, before.shared):
            continue
        own, before = replace(planner, cost=cost_of_trees(cost, forest)), forest
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
        if window is not None and _cuts_longer(plan, forest, window):
            continue
        seconds = evaluate(plan, cluster=cluster, cost=own.cost, num_stages=planner.num_stages).end_seconds
        if best is None or seconds < best[0]:
            best = seconds, plan, forest
    if best is None:
        assert problem is not None, "documents apart are among the limits"
        raise problem
    _, plan, forest = best
    forest.verify(prefixes.lengths[np.argsort(prefixes.order)].tolist())
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


def _cuts_longer(plan: Plan, forest: Forest, window: int) -> bool:
    """Whether a group of several ranks has a tree, and documents that are longer than the window."""
    longest, trees = np.maximum.reduceat(forest.lengths, forest.offsets[:-1]), np.diff(forest.offsets) > 1
    starts, sequences = plan.group_sequence_offsets[:-1], plan.group_sequences
    has_both = np.logical_or.reduceat(trees[sequences], starts) & (
        np.maximum.reduceat(longest[sequences], starts) > window
    )
    return bool((has_both & (plan.group_sizes > 1)).any())


def _common_bytes(first: bytes, second: bytes) -> int:
    count = min(len(first), len(second))
    differs = np.frombuffer(first, np.uint8, count) != np.frombuffer(second, np.uint8, count)
    return int(differs.argmax()) if differs.any() else count
