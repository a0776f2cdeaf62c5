"""Each rule of ``verify`` is broken by exactly one change to a plan that passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.common.errors import PlanError
from bytescale.plan import Plan, RankPlan
from bytescale.plan.io import load_plan, save_plan
from bytescale.plan.layout import member_tokens
from bytescale.plan.plan import GroupSpec
from bytescale.plan.summary import gist
from bytescale.plan.verify import verify
from tests.helpers.effort import examples
from tests.helpers.plans import random_plan


def good() -> Plan:
    """Three ranks of 10 tokens; groups 0 and 1 are shared, 2 to 4 local."""
    return Plan.build(
        lengths=[20, 11, 4, 10, 3, 2],
        capacity_tokens=[10, 10, 10],
        groups=[
            GroupSpec(sequences=[0], ranks=[0, 1, 2]),
            GroupSpec(sequences=[1], ranks=[1, 2]),
            GroupSpec(sequences=[2, 4], ranks=[2]),
            GroupSpec(sequences=[3], ranks=[0]),
            GroupSpec(sequences=[5], ranks=[0]),
        ],
        schedule=[[[0, 4], [3]], [[0], [1]], [[0], [1], [2]]],
    )


def changed(name: str, place: int, value: int) -> Plan:
    plan = good()
    array = getattr(plan, name).copy()
    array[place] = value
    return replace(plan, **{name: array})


def scheduled(schedule: list[list[list[int]]], groups: list[GroupSpec] | None = None) -> Plan:
    plan = good()
    specs = groups or [
        GroupSpec(sequences=plan.sequences_of(group).tolist(), ranks=plan.ranks_of(group).tolist())
        for group in range(plan.num_groups)
    ]
    return Plan.build(lengths=plan.lengths, capacity_tokens=plan.capacity_tokens, groups=specs, schedule=schedule)


def refused(plan: Plan, *parts: str) -> None:
    with pytest.raises(PlanError) as error:
        verify(plan)
    for part in parts:
        assert part in str(error.value)


def test_a_good_plan_passes() -> None:
    verify(good())
    verify(good(), num_stages=4)


def in_domains(schedule: list[list[list[int]]], domain: int) -> Plan:
    return replace(scheduled(schedule), domain=domain)


def test_in_lockstep_a_group_is_in_one_round_on_all_its_members() -> None:
    aligned = in_domains([[[0, 4], [3]], [[0], [1]], [[0], [1], [2]]], 3)
    verify(aligned)
    assert aligned.rank_rounds.tolist() == [3, 3, 3]
    assert [RankPlan.of(aligned, rank).num_rounds for rank in range(3)] == [3, 3, 3]
    assert RankPlan.of(good(), 0).num_rounds == 2
    apart = [[[0, 4], [3]], [[0], [1]], [[0], [2], [1]]]
    verify(in_domains(apart, 1))
    refused(in_domains(apart, 3), "rule 'lockstep'", "group 1 is in different rounds on its ranks 1, 2")
    refused(in_domains(apart, 2), "rule 'lockstep'", "a domain has 2 ranks, which do not divide the 3 ranks")


def test_domains_are_part_of_the_fingerprint_the_file_and_the_words(tmp_path: Path) -> None:
    free, lockstep = good(), replace(good(), domain=3)
    assert lockstep.digest() != free.digest()
    save_plan(lockstep, tmp_path / "plan.npz")
    assert load_plan(tmp_path / "plan.npz").digest() == lockstep.digest()
    assert "in lockstep by 3 ranks" in gist(lockstep)
    assert "lockstep" not in gist(free)
    stored = dict(np.load(tmp_path / "plan.npz"))
    del stored["domain"]
    np.savez(tmp_path / "older.npz", **stored)
    with pytest.raises(PlanError, match=r"older\.npz is not a plan"):
        load_plan(tmp_path / "older.npz")


def test_a_plan_without_sequences_passes() -> None:
    verify(Plan.build(lengths=[], capacity_tokens=[8, 8], groups=[], schedule=[[], []]), num_stages=2)


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("lengths", 3, 0, "lengths[3] is 0, below 1"),
        ("capacity_tokens", 1, 0, "capacity_tokens[1] is 0"),
        ("group_weights", 2, -1, "group_weights[2] is -1"),
        ("group_sequence_offsets", 1, 0, "group_sequence_offsets delimits 0 items at 0"),
        ("group_rank_offsets", 0, 1, "group_rank_offsets does not run from 0 to"),
        ("group_rank_offsets", 1, 9, "group_rank_offsets delimits -4 items at 1"),
        ("micro_batch_group_offsets", 2, 2, "micro_batch_group_offsets delimits 0 items at 1"),
        ("rank_micro_batch_offsets", 3, 6, "rank_micro_batch_offsets does not run from 0 to 7"),
        ("group_sequences", 0, 6, "group_sequences[0] is 6, outside 0..5"),
        ("group_ranks", 4, -1, "group_ranks[4] is -1"),
        ("micro_batch_groups", 1, 7, "micro_batch_groups[1] is 7"),
        ("group_offload_ratio", 2, 2, "ratio of group 2 is 2.0"),
    ],
)
def test_arrays(name: str, place: int, value: int, message: str) -> None:
    refused(changed(name, place, value), "rule 'arrays'", message)
    refused(changed(name, place, value), "rule 'arrays'")


def test_arrays_of_the_wrong_length() -> None:
    plan = good()
    refused(replace(plan, group_weights=plan.group_weights[:-1]), "group_weights has 7 entries where 8 belong")
    refused(replace(plan, capacity_tokens=plan.capacity_tokens[:0]), "no ranks")
    refused(replace(plan, capacity_tokens=plan.capacity_tokens[:2]), "rank_micro_batch_offsets has 4 entries where 3")


def test_a_missing_offload_ratio_is_not_a_number() -> None:
    plan = good()
    refused(replace(plan, group_offload_ratio=np.full(5, np.nan)), "offload ratio of group 0 is nan")


def test_tokens() -> None:
    refused(changed("group_sequences", 0, 1), "rule 'tokens'", "sequence 0 (20 tokens) is in 0 groups")
    refused(changed("group_sequences", 2, 3), "sequence 2", "left out")


def test_tokens_twice() -> None:
    plan = changed("group_sequences", 5, 0)
    refused(plan, "sequence 0 (20 tokens) is in 2 groups instead of 1", "counted more than once")


def test_members() -> None:
    refused(changed("group_ranks", 2, 0), "rule 'members'", "rank 0 is twice in group 0")


def test_members_may_come_in_any_order() -> None:
    plan = good()
    verify(replace(plan, group_ranks=np.array([2, 0, 1, 2, 1, 2, 0, 0])))


def test_two_shared_groups_in_a_micro_batch() -> None:
    plan = scheduled([[[0, 4], [3]], [[0, 1]], [[0, 1], [2]]])
    refused(plan, "rule 'micro-batches'", "micro-batch 0 of rank 1 holds the shared groups 0, 1")


def test_a_shared_group_behind_a_local_one() -> None:
    plan = scheduled([[[4, 0], [3]], [[0], [1]], [[0], [1], [2]]])
    refused(plan, "micro-batch 0 of rank 0 has the shared group 0 behind local ones")


def test_schedule_left_out() -> None:
    refused(scheduled([[[0, 4], [3]], [[0]], [[0], [1], [2]]]), "rule 'schedule'", "group 1 is not scheduled", "rank 1")


def test_schedule_twice() -> None:
    refused(scheduled([[[0, 4], [3], [3]], [[0], [1]], [[0], [1], [2]]]), "group 3 is scheduled 2 times on rank 0")


def test_schedule_elsewhere() -> None:
    refused(
        scheduled([[[0, 4], [3]], [[0], [1], [2]], [[0], [1], [2]]]), "group 2 is scheduled on rank 1, which is not"
    )


def test_capacity() -> None:
    refused(changed("lengths", 3, 11), "rule 'capacity'", "micro-batch 1 of rank 0 holds 11 tokens")


def test_capacity_of_a_slice_counts_its_exact_tokens() -> None:
    """19 tokens over 3 ranks: the first two hold 6, the last 7. Only the last has no room for 4 more."""
    exact = member_tokens(np.array([19]), np.ones(3, dtype=np.int64))[0]
    assert exact.tolist() == [6, 6, 7]
    for rank, fits in ((0, True), (1, True), (2, False)):
        schedule: list[list[list[int]]] = [[[0]], [[0]], [[0]]]
        schedule[rank][0].append(1)
        plan = Plan.build(
            lengths=[19, 4],
            capacity_tokens=[10] * 3,
            groups=[GroupSpec(sequences=[0], ranks=[0, 1, 2]), GroupSpec(sequences=[1], ranks=[rank])],
            schedule=schedule,
        )
        if fits:
            verify(plan)
        else:
            refused(plan, f"micro-batch 0 of rank {rank} holds 11 tokens")


def test_capacity_follows_weights() -> None:
    def plan(weights: list[int]) -> Plan:
        return Plan.build(
            lengths=[12, 12],
            capacity_tokens=[6, 18],
            groups=[GroupSpec(sequences=[0, 1], ranks=[0, 1], weights=weights)],
            schedule=[[[0]], [[0]]],
        )

    verify(plan([1, 3]))
    refused(plan([1, 2]), "micro-batch 0 of rank 0 holds 8 tokens, but the rank's capacity is 6")


@examples(20, 60)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    num_ranks=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
def test_capacity_is_exact_on_random_plans(lengths: list[int], num_ranks: int, seed: int) -> None:
    """Lowering a rank's capacity to what its fullest micro-batch holds passes; one token less does not."""
    plan = random_plan(lengths, num_ranks, seed, weighted=True)
    fullest = np.zeros(num_ranks, dtype=np.int64)
    for rank in range(num_ranks):
        for micro_batch in plan.micro_batches_of(rank):
            held = 0
            for group in plan.groups_of(micro_batch).tolist():
                member = plan.ranks_of(group).tolist().index(rank)
                held += int(
                    member_tokens(plan.lengths[plan.sequences_of(group)], plan.weights_of(group))[:, member].sum()
                )
            fullest[rank] = max(fullest[rank], held)
    verify(replace(plan, capacity_tokens=np.maximum(fullest, 1)))
    for rank in np.flatnonzero(fullest > 1).tolist():
        too_small = np.maximum(fullest, 1)
        too_small[rank] -= 1
        refused(replace(plan, capacity_tokens=too_small), "capacity", f"of rank {rank} holds {fullest[rank]} tokens")


def test_order() -> None:
    plan = scheduled([[[0, 4], [3]], [[0], [1]], [[1], [0], [2]]])
    refused(plan, "rule 'order'", "rank 2 runs the shared group 1 before 0")


@examples(20, 60)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    num_ranks=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    weighted=st.booleans(),
)
def test_random_valid_plans_pass(lengths: list[int], num_ranks: int, seed: int, weighted: bool) -> None:
    verify(random_plan(lengths, num_ranks, seed, weighted=weighted))
