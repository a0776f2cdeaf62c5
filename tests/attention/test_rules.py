"""Scale, window, soft cap, sinks and other widths of V: every kernel against the slow twin, alone and in rings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bytescale.attention import AttentionRules, PackedAttention, RingBuffers, select_kernel
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.group import RankGroup
from tests.helpers.effort import examples, one_in
from tests.helpers.plans import random_plan
from tests.helpers.ranks import run_ranks
from tests.helpers.reference_attention import reference_attention


@dataclass(frozen=True)
class Shape:
    """Of attention: H query heads, G key/value heads, D width of queries and keys, Dv of values."""

    heads: int
    kv_heads: int
    width: int
    value_width: int


SHAPES = [Shape(4, 2, 8, 8), Shape(3, 3, 8, 4), Shape(4, 1, 8, 16), Shape(2, 2, 16, 8)]
NAMES = ("out", "q", "k", "v", "sinks")
# The errors are relative to the largest number of a result.
PRECISIONS = [(torch.float64, 1e-10), (torch.float32, 1e-5)]

rules_of_any_kind = st.builds(
    AttentionRules,
    scale=st.sampled_from([None, 0.3]),
    window=st.sampled_from([None, 1, 2, 3, 7, 20, 1000]),
    soft_cap=st.sampled_from([None, 1.5]),
)


@dataclass
class Data:
    """Rows of all sequences, one after the other."""

    lengths: list[int]
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None

    @staticmethod
    def of(lengths: Sequence[int], shape: Shape, dtype: torch.dtype, with_sinks: bool = False) -> Data:
        generator = torch.Generator().manual_seed(len(lengths))

        def numbers(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

        rows = sum(lengths)
        return Data(
            list(lengths),
            numbers(rows, shape.heads, shape.width),
            numbers(rows, shape.kv_heads, shape.width),
            numbers(rows, shape.kv_heads, shape.value_width),
            numbers(rows, shape.heads, shape.value_width),
            numbers(shape.heads) if with_sinks else None,
        )

    def double(self) -> Data:
        wide = [None if x is None else x.double() for x in (self.q, self.k, self.v, self.dout, self.sinks)]
        return Data(self.lengths, *wide)  # type: ignore[arg-type]


def expected(data: Data, rules: AttentionRules) -> dict[str, Tensor]:
    """Output and gradients in fp64, by the reference and autograd."""
    wide = data.double()
    leaves = {name: getattr(wide, name) for name in ("q", "k", "v", "sinks") if getattr(wide, name) is not None}
    for leaf in leaves.values():
        leaf.requires_grad_()
    out = reference_attention(wide.q, wide.k, wide.v, data.lengths, rules, wide.sinks)
    out.backward(wide.dout)
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}  # type: ignore[dict-item]


def on_ranks(data: Data, rules: AttentionRules, plan: Plan, kernel: str) -> tuple[dict[str, Tensor], list[int]]:
    """The same by ``PackedAttention`` on every rank of a plan, put together again; bytes that each rank sent."""
    edges = [0, *torch.tensor(data.lengths).cumsum(0).tolist()]

    def one_rank(hdp: RankGroup) -> tuple[list[tuple[Tensor, dict[str, Tensor]]], Tensor | None, int]:
        results, sinks = [], None if data.sinks is None else data.sinks.clone().requires_grad_()
        for micro_batch in RankPlan.of(plan, hdp.rank).micro_batches:
            places = torch.cat(
                [
                    torch.arange(edges[sequence] + start, edges[sequence] + stop)
                    for sequence, start, stop in zip(
                        micro_batch.segment_sequences.tolist(),
                        micro_batch.segment_starts.tolist(),
                        micro_batch.segment_stops.tolist(),
                        strict=True,
                    )
                ]
            )
            q, k, v = (rows[places].requires_grad_() for rows in (data.q, data.k, data.v))
            chosen = select_kernel(kernel, q.device, q.dtype)
            buffers = RingBuffers()
            out = PackedAttention(micro_batch, chosen, hdp.exchange, buffers=buffers)(q, k, v, rules, sinks)
            out.backward(data.dout[places])
            results.append((places, {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}))
        return results, None if sinks is None else sinks.grad, hdp.exchange.bytes_sent  # type: ignore[return-value]

    outcomes = run_ranks(plan.num_ranks, one_rank)
    likes = {"out": data.dout, "q": data.q, "k": data.k, "v": data.v}
    whole = {name: torch.full_like(like, torch.nan) for name, like in likes.items()}
    for results, _, _ in outcomes:
        for places, parts in results:
            for name, rows in parts.items():
                whole[name][places] = rows
    if data.sinks is not None:
        whole["sinks"] = torch.stack([g for _, g, _ in outcomes if g is not None]).sum(dim=0)
    return whole, [sent for _, _, sent in outcomes]


def largest_error(ours: Tensor, theirs: Tensor) -> float:
    """Relative to the largest number, or to 1 if that is larger."""
    return float((ours.double() - theirs).abs().max() / theirs.abs().max().clamp(min=1.0))


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert set(ours) == set(theirs)
    for name in theirs:
        error = largest_error(ours[name], theirs[name])
        assert error <= tolerance, f"{name} is off by {error:.2g}"


def alone(lengths: Sequence[int]) -> Plan:
    groups = [GroupSpec(sequences=list(range(len(lengths))), ranks=[0])]
    return Plan.build(lengths=lengths, capacity_tokens=[sum(lengths)], groups=groups, schedule=[[[0]]])


@examples(9, 60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    shape=st.sampled_from(SHAPES),
    rules=rules_of_any_kind,
    with_sinks=st.booleans(),
    precision=st.sampled_from(PRECISIONS),
    kernel=st.sampled_from(["flash", "math"]),
)
def test_rules_on_one_rank(
    lengths: list[int],
    shape: Shape,
    rules: AttentionRules,
    with_sinks: bool,
    precision: tuple[torch.dtype, float],
    kernel: str,
) -> None:
    dtype, tolerance = precision
    data = Data.of(lengths, shape, dtype, with_sinks)
    ours, _ = on_ranks(data, rules, alone(lengths), kernel)
    assert_equal(ours, expected(data, rules), tolerance)


@examples(12, 80)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    num_ranks=st.integers(2, 4),
    seed=st.integers(0, 10_000),
    weighted=st.booleans(),
    shape=st.sampled_from(SHAPES),
    rules=rules_of_any_kind,
    with_sinks=st.booleans(),
    precision=st.sampled_from(PRECISIONS),
    kernel=st.sampled_from(["flash", "math"]),
)
def test_rules_in_rings(
    lengths: list[int],
    num_ranks: int,
    seed: int,
    weighted: bool,
    shape: Shape,
    rules: AttentionRules,
    with_sinks: bool,
    precision: tuple[torch.dtype, float],
    kernel: str,
) -> None:
    """Any lengths, any members, one token or none on a member, local sequences beside shared ones."""
    dtype, tolerance = precision
    data = Data.of(lengths, shape, dtype, with_sinks)
    ours, _ = on_ranks(data, rules, random_plan(lengths, num_ranks, seed, weighted=weighted), kernel)
    assert_equal(ours, expected(data, rules), tolerance)


def over_all(lengths: Sequence[int], num_ranks: int) -> Plan:
    """All sequences in one group of all ranks."""
    groups = [GroupSpec(sequences=list(range(len(lengths))), ranks=range(num_ranks))]
    return Plan.build(
        lengths=lengths, capacity_tokens=[sum(lengths)] * num_ranks, groups=groups, schedule=[[[0]]] * num_ranks
    )


SMALL = Shape(2, 1, 4, 2)
ROW_BYTES = 4 * (SMALL.width + SMALL.value_width)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_window_sends_the_rows_in_its_reach_whatever_the_length(num_ranks: int) -> None:
    """Each inner edge between members' segments is crossed by ``w - 1`` rows: twice as keys, once as gradients."""
    window = 9
    for length in (200, 403):
        data = Data.of([length], SMALL, torch.float32)
        ours, sent = on_ranks(data, AttentionRules(window=window), over_all([length], num_ranks), "flash")
        assert_equal(ours, expected(data, AttentionRules(window=window)), 1e-5)
        edges = 2 * num_ranks - 2  # the two segments of the last member touch
        assert sum(sent) == edges * (window - 1) * 3 * ROW_BYTES


def test_a_window_of_one_key_sends_nothing() -> None:
    _, sent = on_ranks(Data.of([50], SMALL, torch.float32), AttentionRules(window=1), over_all([50], 3), "flash")
    assert sent == [0, 0, 0]


@pytest.mark.parametrize("window", one_in(3, [100, 2, 20, 49, 50, 51, 99, 101]))
def test_no_window_sends_more_than_the_ring(window: int) -> None:
    """Windows of more than a segment, too: rows that both segments of a member look at travel once."""
    data = Data.of([100, 3], SMALL, torch.float32)
    plan = over_all([100, 3], 3)
    full, ring = on_ranks(data, AttentionRules(), plan, "flash")
    ours, sent = on_ranks(data, AttentionRules(window=window), plan, "flash")
    assert sum(sent) <= sum(ring)
    if window >= 100:
        assert sent == ring
        assert all(torch.equal(ours[name], full[name]) for name in full)
