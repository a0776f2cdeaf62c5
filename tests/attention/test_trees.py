"""Trees of documents: rows and blocks against the slow twin, in which every document is looked at path by path."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.attention.blocks import BlockSet
from bytescale.attention.trees import blocks_between, own_blocks
from bytescale.common.errors import PlanError
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.hf.batch.planning import make_planner
from bytescale.parity.compare import random_plan
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.plan.trees import Forest
from bytescale.plan.verify import verify
from bytescale.planner.evaluate import evaluate
from bytescale.planner.prefixes import Prefixes, cost_of_trees, plan_prefixes, with_equal_work
from tests.helpers.effort import examples

CHEAP_NODES = CostModel(attention_seconds_per_pair=1.0, token_seconds=0.0)
"""Nodes cost nothing, so that all that documents have in common is shared."""


def random_tree(random: np.random.Generator, most: int = 40) -> list[list[int]]:
    """Documents: paths of a random tree of depth 1 to 6 and fan-out 1 to 16; a token is one of three.

    Branches may be empty or of one token. Documents may end in the middle of the tree, and be equal.
    """
    found: list[list[int]] = []

    def grow(path: list[int], depth: int) -> None:
        path = path + random.integers(0, 3, random.choice([0, 1, 2, 7])).tolist()
        if len(found) < most and path and (depth == 0 or random.random() < 0.3):
            found.append(path)
        for _ in range(int(random.integers(1, random.choice([3, 17]))) if depth else 0):
            if len(found) < most:
                grow(path, depth - 1)

    while not found:
        grow([], int(random.integers(1, 7)))
    return [found[place] for place in random.permutation(len(found))]


def forest_of(documents: list[list[int]], limit: int, cost: CostModel = CHEAP_NODES) -> Forest:
    prefixes = Prefixes.of([bytes(document) for document in documents], 1)
    return prefixes.forest(prefixes.worthwhile(cost), limit)


def tokens_of(forest: Forest, documents: list[list[int]]) -> list[int]:
    parts = zip(forest.documents.tolist(), forest.shared.tolist(), strict=True)
    return [token for number, shared in parts for token in documents[number][shared:]]


def visible(forest: Forest) -> np.ndarray:
    """``[T, T]`` whether a row sees another, by the path of every document."""
    rows = int(forest.sequence_lengths.sum())
    seen = np.zeros((rows, rows), dtype=int)
    first = np.cumsum(forest.sequence_lengths) - forest.sequence_lengths
    for path, sequence in zip(forest.paths, forest.sequence_of.tolist(), strict=True):
        place = path + first[sequence]
        for at in range(len(place)):
            seen[place[at]] = 0
            seen[place[at], place[: at + 1]] = 1
    return seen


def add_pairs(counts: np.ndarray, blocks: BlockSet, queries: np.ndarray, keys: np.ndarray) -> None:
    """Count the pairs of blocks; ``queries`` and ``keys`` say which row of all a member's row is."""
    for ranges in (blocks.queries, blocks.keys):
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(ranges)), "ranges overlap or fall"
    for (start, stop), (first, last) in zip(blocks.queries, blocks.keys, strict=True):
        pairs = np.ones((stop - start, last - first), dtype=int)
        counts[np.ix_(queries[start:stop], keys[first:last])] += np.tril(pairs) if blocks.causal else pairs


@examples(60, 1500)
@given(st.integers(0, 2**32), st.sampled_from([1, 5, 20, 10**6]))
def test_rows_and_pairs_are_those_of_the_paths(seed: int, limit: int) -> None:
    random = np.random.default_rng(seed)
    documents = random_tree(random)
    forest = forest_of(documents, limit)
    forest.verify(np.array([len(document) for document in documents]))
    largest = int(forest.sequence_lengths[np.diff(forest.offsets) > 1].max(initial=0))
    assert np.array_equal(forest_of(documents, largest).shared, forest.shared)  # a limit that cuts nothing more
    assert [min(own) for own in np.split(forest.documents, forest.offsets[1:-1])] == sorted(
        min(own) for own in np.split(forest.documents, forest.offsets[1:-1])
    )
    tokens, first = tokens_of(forest, documents), np.cumsum(forest.sequence_lengths) - forest.sequence_lengths
    for number, sequence, path in zip(forest.documents.tolist(), forest.sequence_of, forest.paths, strict=True):
        assert [tokens[row] for row in path + first[sequence]] == documents[number]
    alone = np.diff(forest.offsets) == 1
    assert (alone | (forest.sequence_lengths <= limit)).all()
    if limit == 10**6:  # nothing is cut: every prefix of one token at least exists once
        starts = {tuple(document[:length]) for document in documents for length in range(1, len(document) + 1)}
        assert forest.sequence_lengths.sum() == len(starts)
    plan = RankPlan.of(random_plan(forest.sequence_lengths.tolist(), 1, 0), 0)
    for micro_batch in plan.micro_batches:
        own = micro_batch.with_trees(forest).trees
        assert own is not None
        triangles, nodes = own_blocks(micro_batch.with_trees(forest), own)
        counts = np.zeros((micro_batch.num_tokens,) * 2, dtype=int)
        for blocks in (triangles, *nodes):
            add_pairs(counts, blocks, np.arange(len(counts)), np.arange(len(counts)))
        np.testing.assert_array_equal(counts, visible(own))


@examples(40, 1000)
@given(st.integers(0, 2**32), st.integers(2, 4))
def test_members_of_a_group_compute_every_pair_once(seed: int, num_ranks: int) -> None:
    """Under random plans: every pair of a query and a key that it sees is in one block of one pair of members."""
    random = np.random.default_rng(seed)
    documents = [document for _ in range(3) for document in random_tree(random, 8)]
    forest = forest_of(documents, int(random.choice([12, 10**6])))
    plan = random_plan(forest.sequence_lengths.tolist(), num_ranks, seed, weighted=bool(seed % 2))
    for rank in range(num_ranks):
        for micro_batch in RankPlan.of(plan, rank).micro_batches:
            shared = micro_batch.shared
            if shared is None or shared.member:
                continue
            trees = forest.of(shared.sequences)
            counts = np.zeros((int(shared.lengths.sum()),) * 2, dtype=int)
            rows = [rows_of(shared.lengths, own) for own in shared.bounds]
            for member, source in itertools.product(range(shared.size), repeat=2):
                if member == source:
                    alone = replace(micro_batch, shared=replace(shared, member=member), local_lengths=np.zeros(0, int))
                    triangles, nodes = own_blocks(alone, trees)
                    found = [triangles, *nodes]
                else:
                    found = blocks_between(shared, trees, member, source)
                for blocks in found:
                    add_pairs(counts, blocks, rows[member], rows[source])
            np.testing.assert_array_equal(counts, visible(trees))


@examples(30, 500)
@given(st.integers(0, 2**32), st.integers(2, 4), st.sampled_from([0.0, 5.0]))
def test_members_of_a_ring_have_equal_work(seed: int, num_ranks: int, token_seconds: float) -> None:
    """Counted by pairs: up to a few rows, because rows are not cut. Without room for more rows, nothing changes."""
    documents = [document for _ in range(2) for document in random_tree(np.random.default_rng(seed), 12)]
    forest = forest_of([[1] * 60 + document for document in documents], 10**6)
    cost = CostModel(attention_seconds_per_pair=1.0, token_seconds=token_seconds)
    total, group = int(forest.sequence_lengths.sum()), GroupSpec(sequences=[0], ranks=range(num_ranks))
    full = -(-total // num_ranks)
    plans = [
        Plan.build(lengths=[total], capacity_tokens=[room] * num_ranks, groups=[group], schedule=[[[0]]] * num_ranks)
        for room in (total, full)
    ]
    even, work = with_equal_work(plans[0], forest, cost), np.zeros(num_ranks)
    for rank in range(num_ranks):
        micro_batch = RankPlan.of(even, rank).micro_batches[0]
        shared, trees = micro_batch.shared, forest.of(np.arange(1))
        assert shared is not None
        sets = [blocks_between(shared, trees, rank, other) for other in range(num_ranks) if other != rank]
        triangles, nodes = own_blocks(replace(micro_batch, local_lengths=np.zeros(0, int)), trees)
        for blocks in [triangles, *nodes, *itertools.chain.from_iterable(sets)]:
            for (start, stop), (first, last) in zip(blocks.queries, blocks.keys, strict=True):
                count = stop - start
                work[rank] += count * (last - first) - (count * (count - 1) / 2 if blocks.causal else 0)
        rows = int(shared.tokens_per_member[rank])
        work[rank] = 2 * work[rank] + (token_seconds - 1) * rows  # s^2 counts the diagonal once
    assert work.sum() == pytest.approx(cost_of_trees(cost, forest).work_seconds([total])[0])
    of_a_row = 2 * int(forest.lengths.max()) + token_seconds
    assert (abs(work - work.mean()) <= 3 * of_a_row).all()
    (verify(even), verify(with_equal_work(plans[1], forest, cost)))


def rows_of(lengths: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Which row of all sequences each row of a member is."""
    first = np.cumsum(lengths) - lengths
    parts = [np.arange(a, b) + at for at, own in zip(first, bounds, strict=True) for a, b in own]
    return np.concatenate(parts)


def test_a_wrong_forest_is_found() -> None:
    documents = [[1, 2, 0], [1, 2, 1], [1, 2, 2, 2], [0]]
    lengths = np.array([len(document) for document in documents])
    forest = forest_of(documents, 10**6)
    forest.verify(lengths)
    assert forest.shared.sum() == 4
    with pytest.raises(PlanError, match="are not its"):
        forest.verify(np.array([3, 3, 5, 1]))
    with pytest.raises(PlanError, match="are not its"):
        replace(forest, lengths=forest.lengths + np.eye(4, dtype=int)[1]).verify(lengths)
    with pytest.raises(PlanError, match="are not its"):
        replace(forest, shared=forest.shared + 2 * np.eye(4, dtype=int)[1]).verify(lengths)  # longer than that path
    with pytest.raises(PlanError, match="every document once"):
        forest.of(np.arange(1)).verify(lengths)


def test_what_does_not_pay_is_not_shared() -> None:
    """A token that all documents begin with saves less than merging its rectangle takes; a long prompt is shared."""
    cost = CostModel(attention_seconds_per_pair=1e-9, token_seconds=1e-6)
    random = np.random.default_rng(0)
    answers = [random.integers(2, 200, 200).tolist() for _ in range(32)]
    assert not forest_of([[1, *answer] for answer in answers], 10**6, cost).shared.any()
    prompt = [1] * 100
    shared = forest_of([prompt + answer for answer in answers], 10**6, cost).shared
    assert sorted(shared) == [0, *[100] * 31]


def test_the_limit_is_the_one_whose_plan_ends_first() -> None:
    """One tree of all documents would leave three of four ranks idle; the prompt is computed again instead."""
    random = np.random.default_rng(0)
    documents = [[1] * 200 + random.integers(2, 200, 200).tolist() for _ in range(32)]
    prefixes = Prefixes.of([bytes(document) for document in documents], 1)
    planner = make_planner(num_ranks=4, capacity_tokens=8000)
    plan, forest = plan_prefixes(planner, prefixes)
    assert forest is not None
    np.testing.assert_array_equal(plan.lengths, forest.sequence_lengths)
    cost = CostModel.from_work()
    trees = evaluate(plan, cluster=Cluster.uniform(4, 8000), cost=cost_of_trees(cost, forest))
    apart = evaluate(planner([400] * 32), cluster=Cluster.uniform(4, 8000), cost=cost)
    assert trees.end_seconds < 0.6 * apart.end_seconds
    assert trees.over_ideal < 1.05


def test_a_tree_has_the_work_of_its_pairs() -> None:
    documents = [[1] * 50 + [number] * 30 for number in range(2, 6)]
    forest = forest_of([*documents, [0] * 170], 10**6)
    assert forest.sequence_lengths.tolist() == [170, 170]  # a tree, and a document as long
    pairs = 2 * int(visible(forest.of(np.arange(1))).sum()) - 170  # s^2 counts the diagonal once
    cost = cost_of_trees(CostModel.from_work(), forest)
    assert cost.squares_of([170, 171]).tolist() == [(pairs + 170**2) / 2, 171**2]
