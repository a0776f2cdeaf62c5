"""Ring attention against per-document SDPA, and the bytes that it sends against the formula."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytescale.attention import PackedAttention, RingBuffers, select_kernel
from bytescale.common.errors import ConfigError
from bytescale.cost.profile import Profile
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.group import RankGroup
from tests.helpers.effort import examples
from tests.helpers.llama import spec_of_llama
from tests.helpers.plans import random_plan
from tests.helpers.ranks import run_ranks
from tests.helpers.reference_attention import reference_attention

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def inputs(lengths: list[int], dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def rows(length: int, heads: int) -> torch.Tensor:
        return torch.randn(length, heads, WIDTH, generator=generator, dtype=torch.float64).to(dtype)

    names = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "dout": HEADS}
    return [{name: rows(length, heads) for name, heads in names.items()} for length in lengths]


def attend(plan: Plan, data: list[dict[str, torch.Tensor]], kernel: str = "auto") -> tuple[list[dict], list[int]]:
    """Outputs and gradients of every sequence, put back together from all ranks; bytes sent by each rank."""

    def one_rank(hdp: RankGroup) -> tuple[list, int]:
        pieces = []
        buffers = RingBuffers()
        for micro_batch in RankPlan.of(plan, hdp.rank).micro_batches:
            segments = list(
                zip(
                    micro_batch.segment_sequences.tolist(),
                    micro_batch.segment_starts.tolist(),
                    micro_batch.segment_stops.tolist(),
                    strict=True,
                )
            )
            q, k, v, dout = (
                torch.cat([data[s][name][a:b] for s, a, b in segments]) for name in ("q", "k", "v", "dout")
            )
            leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
            chosen = select_kernel(kernel, q.device, q.dtype)
            packed = PackedAttention(micro_batch, chosen, hdp.exchange, buffers=buffers)
            out = packed(*leaves)
            out.backward(dout)
            counts = [b - a for _, a, b in segments]
            results = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}
            for name, rows in results.items():
                pieces += [(name, segment, part) for segment, part in zip(segments, rows.split(counts), strict=True)]
        return pieces, hdp.exchange.bytes_sent

    outcomes = run_ranks(plan.num_ranks, one_rank)
    whole = [
        {name: torch.full_like(sequence["q" if name == "out" else name], torch.nan) for name in ("out", "q", "k", "v")}
        for sequence in data
    ]
    for pieces, _ in outcomes:
        for name, (sequence, start, stop), part in pieces:
            whole[sequence][name][start:stop] = part
    return whole, [sent for _, sent in outcomes]


def reference(sequence: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    q, k, v = (sequence[name].detach().double().requires_grad_() for name in ("q", "k", "v"))
    out = reference_attention(q, k, v, [len(q)])
    out.backward(sequence["dout"].double())
    return {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}


@examples(6, 40)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    num_ranks=st.integers(1, 8),
    seed=st.integers(0, 10_000),
    # fp64 is exact to the order of sums, fp32 to 24 bits, bf16 to 8 bits of each block's result.
    precision=st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]),
    kernel=st.sampled_from(["flash", "math"]),
    weighted=st.booleans(),
)
def test_ring_attention_is_attention(
    lengths: list[int], num_ranks: int, seed: int, precision: tuple[torch.dtype, float], kernel: str, weighted: bool
) -> None:
    dtype, tolerance = precision
    data = inputs(lengths, dtype)
    ours, _ = attend(random_plan(lengths, num_ranks, seed, weighted=weighted), data, kernel)
    for sequence, result in zip(data, ours, strict=True):
        for name, expected in reference(sequence).items():
            torch.testing.assert_close(result[name].double(), expected, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.exhaustive
def test_thirty_two_ranks_on_a_sequence_that_nothing_divides() -> None:
    lengths = [1009]
    data = inputs(lengths, torch.float64)
    plan = Plan.build(
        lengths=lengths,
        capacity_tokens=[32] * 32,
        groups=[GroupSpec(sequences=[0], ranks=range(32))],
        schedule=[[[0]]] * 32,
    )
    ours, _ = attend(plan, data)
    for name, expected in reference(data[0]).items():
        torch.testing.assert_close(ours[0][name], expected, rtol=1e-11, atol=1e-12)


def test_a_batch_of_short_documents_sends_nothing() -> None:
    lengths = [5, 9, 30, 2]
    plan = Plan.build(
        lengths=lengths,
        capacity_tokens=[40, 40],
        groups=[GroupSpec(sequences=[0, 2], ranks=[0]), GroupSpec(sequences=[1, 3], ranks=[1])],
        schedule=[[[0]], [[1]]],
    )
    _, bytes_sent = attend(plan, inputs(lengths, torch.float32))
    assert bytes_sent == [0, 0]


def over_all(length: int, num_ranks: int, columns: int = 1) -> Plan:
    """One sequence, shared by all ranks."""
    return Plan.build(
        lengths=[length],
        capacity_tokens=[length] * num_ranks,
        groups=[GroupSpec(sequences=[0], ranks=range(num_ranks), columns=columns)],
        schedule=[[[0]]] * num_ranks,
    )


def gradient_errors(
    num_ranks: int,
    dtype: torch.dtype,
    columns: int = 1,
    names: Sequence[str] = ("k", "v"),
) -> float:
    """``|d - fp64's| / |fp64's|`` (2-norms) of the gradients of a sequence over ``num_ranks``, against plain fp64."""
    data = inputs([8 * num_ranks + 1], dtype)
    ours, _ = attend(over_all(len(data[0]["q"]), num_ranks, columns), data, "math")
    expected = reference(data[0])
    off, size = (
        torch.cat([(scale * expected[name] - other[name].double()).flatten() for name in names]).norm()
        for scale, other in ((1.0, ours[0]), (2.0, expected))
    )
    return float(off / size)


def test_gradients_travel_in_the_dtype_of_sums() -> None:
    """In bf16 they would be off by 2^-9 and more at every hop; 8 ranks are as exact as fp32 is."""
    assert gradient_errors(8, torch.float32) < 1e-6


def test_all_layers_of_a_micro_batch_use_the_same_buffers() -> None:
    """Calls with fewer heads as well: head groups and layers come one after the other."""
    plan = over_all(24, 3)

    def one_rank(hdp: RankGroup) -> list[int]:
        (micro_batch,) = RankPlan.of(plan, hdp.rank).micro_batches
        kernel = select_kernel("auto", torch.device("cpu"), torch.float32)
        buffers = RingBuffers()
        attention = PackedAttention(micro_batch, kernel, hdp.exchange, buffers=buffers)
        places = []
        for heads in (4, 2, 4):
            q, k, v = (torch.randn(micro_batch.num_tokens, heads, WIDTH) for _ in range(3))
            out, lse = attention.forward(q, k, v)
            attention.backward(out, q, k, v, out, lse)
            grid = attention.grid
            assert grid is not None
            messages = (*grid.kv_buffers(k, v), *grid.gradient_buffers(k, v))
            assert all(message.is_contiguous() for message in messages)
            places += [message.data_ptr() for message in messages]
        buffers.release()
        return places

    for places in run_ranks(3, one_rank):
        assert len(set(places)) == 4


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float32), (3, torch.float32), (5, torch.float64), (4, torch.bfloat16)]
)
def test_a_shared_sequence_sends_what_the_ring_formula_says(size: int, dtype: torch.dtype) -> None:
    """Each K/V slice passes every other member once forward and once backward, its gradient once; own data stays."""
    lengths, local = [101], [7]
    plan = Plan.build(
        lengths=lengths + local,
        capacity_tokens=[200] * size,
        groups=[GroupSpec(sequences=[0], ranks=range(size)), GroupSpec(sequences=[1], ranks=[0])],
        schedule=[[[0, 1]]] + [[[0]]] * (size - 1),
    )
    _, bytes_sent = attend(plan, inputs(lengths + local, dtype))
    spec = spec_of_llama("tiny", num_key_value_heads=KV_HEADS, head_dim=WIDTH)
    profile = Profile.from_flops(spec, flops_per_second=1.0, bytes_per_element=dtype.itemsize)
    per_row = profile.ring_forward_bytes_per_token + profile.ring_backward_bytes_per_token
    assert per_row == 2 * KV_HEADS * WIDTH * (2 * dtype.itemsize + max(4, dtype.itemsize))
    assert sum(bytes_sent) == 101 * (size - 1) * per_row


def test_cuda_has_no_flash_kernel_for_fp32() -> None:
    with pytest.raises(ConfigError, match=r"no CUDA flash attention for float32.*To fix: set trainer.dtype"):
        select_kernel("auto", torch.device("cuda"), torch.float32)
