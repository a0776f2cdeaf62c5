"""States before every fragment: by the scan and by the chain they are those of one process, and so are gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bytescale.attention import Exchange, PackedAttention, select_kernel
from bytescale.parity.thread_ranks import run_ranks
from bytescale.plan import Plan, RankPlan, states
from bytescale.plan.plan import GroupSpec
from bytescale.recurrence.cuts import Cuts, GroupCuts, OneProcessCuts
from tests.helpers.effort import examples, one_of

WIDTH = 3
"""Rows before a fragment that are fetched; many fragments are shorter."""


def shared_plan(lengths: Sequence[int], num_ranks: int, weights: Sequence[int], local: int = 3) -> Plan:
    """One group of all ranks, in an order that is not theirs, and one document of rank 0's own."""
    ranks = [*range(1, num_ranks), 0]
    groups = [
        GroupSpec(sequences=list(range(len(lengths))), ranks=ranks, weights=list(weights)),
        GroupSpec(sequences=[len(lengths)], ranks=[0]),
    ]
    return Plan.build(
        lengths=[*lengths, local],
        capacity_tokens=[sum(lengths) + local] * num_ranks,
        groups=groups,
        schedule=[[[0, 1] if rank == 0 else [0]] for rank in range(num_ranks)],
    )


def layer(cuts: Cuts, rows: Tensor, runs: Callable[[slice], tuple[Tensor, Tensor]]) -> Tensor:
    """Some function of all that a fragment gets from the tokens before it; ``runs`` says what rows do to a state."""
    rows, arrived, places = cuts.halo(rows, WIDTH)
    pool = torch.cat([rows, arrived, rows.new_zeros(1, rows.shape[1])])
    effects = [runs(part) for part in cuts.fragments]
    decay, state = (torch.stack(parts) for parts in zip(*effects, strict=True))
    out, entry = cuts.entry(rows.sin(), decay, state)
    nearness = torch.arange(1, WIDTH + 1).to(rows)[:, None]
    added = [
        out[part] * entry[number].sum() + (pool[places[number]] * nearness).sum(0).cos()
        for number, part in enumerate(cuts.fragments)
    ]
    return torch.cat([*added, out[cuts.fragments[-1].stop :]])


def effects(rows: Tensor, *, matrix: bool) -> Callable[[slice], tuple[Tensor, Tensor]]:
    """What rows do to a state ``[2, 2, 2]``; none do nothing."""

    def effect(part: slice) -> tuple[Tensor, Tensor]:
        state = rows.new_zeros(2, 2, 2)
        decay = torch.eye(2).to(rows).expand(2, 2, 2) if matrix else rows.new_ones(2, 1, 1)
        for row in rows[part]:
            step = 0.3 * row[:8].view(2, 2, 2).sin() if matrix else row[:2].view(2, 1, 1).sigmoid()
            decay = step @ decay if matrix else step * decay
            state = (step @ state if matrix else step * state) + row[-8:].view(2, 2, 2)
        return decay, state

    return effect


@pytest.mark.parametrize("way", ["scan", "chain"])
@examples(6, 60)
@given(
    num_ranks=st.integers(2, 5),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    weights=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    matrix=st.booleans(),
    seed=st.integers(0, 99),
)
def test_members_get_the_states_of_one_process(
    way: str, num_ranks: int, lengths: list[int], weights: list[int], matrix: bool, seed: int
) -> None:
    plan = shared_plan(lengths, num_ranks, weights[:num_ranks])
    random = torch.Generator().manual_seed(seed)
    whole = [torch.randn(length, 16, generator=random).double() for length in [*lengths, 3]]
    factors = [torch.randn(length, 16, generator=random).double() for length in [*lengths, 3]]

    def one_rank(group: dist.ProcessGroup) -> list[tuple[int, slice, Tensor, Tensor]]:
        (micro_batch,) = RankPlan.of(plan, group.rank()).micro_batches
        kernel = select_kernel("math", torch.device("cpu"), torch.float64)
        exchange = Exchange(group, group.rank())
        attention = PackedAttention(micro_batch, kernel, exchange)
        bounds = [
            (sequence, slice(start, stop))
            for sequence, start, stop in zip(
                micro_batch.segment_sequences.tolist(), micro_batch.segment_starts.tolist(),
                micro_batch.segment_stops.tolist(), strict=True,
            )
        ]  # fmt: skip
        empty = not micro_batch.num_tokens  # one row that stands for no token
        rows = torch.cat([whole[s][part] for s, part in bounds] + [torch.zeros(int(empty), 16).double()])
        factor = torch.cat([factors[s][part] for s, part in bounds] + [torch.zeros(int(empty), 16).double()])
        rows.requires_grad_()
        out = layer(GroupCuts(attention), rows, effects(rows, matrix=matrix))
        (gradient,) = torch.autograd.grad((out * factor).sum(), rows)
        sizes = [stop.stop - stop.start for _, stop in bounds] + [int(empty)]
        parts = zip(bounds, out.detach().split(sizes), gradient.split(sizes), strict=False)
        assert way == "chain" or exchange.bytes_sent > 0
        return [(sequence, part, one, other) for (sequence, part), one, other in parts]

    with patch("bytescale.recurrence.cuts.chain_is_faster", lambda *_: way == "chain"):
        found = [part for rank in run_ranks(num_ranks, one_rank) for part in rank]
    for sequence, (rows, factor) in enumerate(zip(whole, factors, strict=True)):
        own = sorted((part.start, part.stop) for one, part, _, _ in found if one == sequence)
        edges = [0, *[stop for _, stop in own]]
        leaf = rows.clone().requires_grad_()
        if sequence == len(lengths):  # of rank 0's own
            out = leaf.sin()
        else:
            out = layer(OneProcessCuts(edges), leaf, effects(leaf, matrix=matrix))
        (gradient,) = torch.autograd.grad((out * factor).sum(), leaf)
        for one, part, values, of_values in found:
            if one == sequence:
                torch.testing.assert_close(values, out.detach()[part], rtol=0, atol=1e-10)
                torch.testing.assert_close(of_values, gradient[part], rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", one_of([2, 3, 4, 7, 8], 4))
def test_a_scan_sends_what_the_formula_says(size: int) -> None:
    """The busiest member's bytes, round by round, do not depend on the sequence's length."""
    plans = [shared_plan([length], size, [1] * size) for length in (40, 400)]

    def one_rank(group: dist.ProcessGroup, plan: Plan) -> int:
        (micro_batch,) = RankPlan.of(plan, group.rank()).micro_batches
        exchange = Exchange(group, group.rank())
        kernel = select_kernel("math", torch.device("cpu"), torch.float32)
        cuts = GroupCuts(PackedAttention(micro_batch, kernel, exchange))
        cuts.entry(torch.ones(1), torch.ones(2, 4, 3, 3), torch.ones(2, 4, 3, 5))
        return exchange.bytes_sent

    with patch("bytescale.recurrence.cuts.chain_is_faster", lambda *_: False):
        short, long = (run_ranks(size, lambda group, plan=plan: one_rank(group, plan)) for plan in plans)
    assert short == long
    rounds = states.scan_bytes(size, 4 * 4 * 9, 4 * 4 * 15)
    assert len(rounds) == (2 * size - 1).bit_length()
    assert max(short) <= sum(rounds) <= 4 * (4 * 4 * 24) * len(rounds)


def test_a_chain_wins_in_small_groups_and_for_large_states_that_few_members_hand_on() -> None:
    assert states.chain_is_faster(2, 2**10, 2**10)
    assert not states.chain_is_faster(8, 2**20, 2**20)
    assert not states.chain_is_faster(64, 0, 2**23)
