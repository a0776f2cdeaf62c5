"""Groups whose members form a grid, against whole sequences, a slow twin, and the formula of their traffic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bytescale.attention.blocks import causal_triangles
from bytescale.attention.kernels import MathKernel, merge_rows
from bytescale.attention.rings.grid import _equivalent_output
from bytescale.attention.trees import blocks_between
from bytescale.common.errors import PlanError
from bytescale.plan import Plan, RankPlan, SharedGroup
from bytescale.plan.io import load_plan, save_plan
from bytescale.plan.layout import member_tokens
from bytescale.plan.plan import GroupSpec
from bytescale.plan.trees import Forest
from bytescale.plan.verify import verify
from tests.attention.test_ring import HEADS, KV_HEADS, WIDTH, attend, gradient_errors, inputs, reference
from tests.helpers.effort import examples, one_in
from tests.helpers.reference_attention import reference_attention

SHAPES = [(size, columns) for size in range(2, 17) for columns in range(1, size + 1) if size % columns == 0]


def grid_plan(lengths: list[int], size: int, columns: int, weights: tuple[int, ...] = ()) -> Plan:
    """All sequences in one group of all ranks."""
    group = GroupSpec(sequences=range(len(lengths)), ranks=range(size), weights=weights, columns=columns)
    return Plan.build(lengths=lengths, capacity_tokens=[sum(lengths)] * size, groups=[group], schedule=[[[0]]] * size)


@examples(5, 120)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    shape=st.sampled_from(SHAPES),
    weighted=st.booleans(),
    # As for rings: fp64 is exact to the order of sums, fp32 to 24 bits, bf16 to 8 bits of each block's result.
    precision=st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]),
    kernel=st.sampled_from(["flash", "math"]),
)
def test_a_grid_of_any_shape_is_attention(
    lengths: list[int],
    shape: tuple[int, int],
    weighted: bool,
    precision: tuple[torch.dtype, float],
    kernel: str,
) -> None:
    (size, columns), (dtype, tolerance) = shape, precision
    data = inputs(lengths, dtype)
    weights = tuple(1 + member % 3 for member in range(size)) if weighted else ()
    ours, _ = attend(grid_plan(lengths, size, columns, weights), data, kernel)
    for sequence, result in zip(data, ours, strict=True):
        for name, expected in reference(sequence).items():
            torch.testing.assert_close(result[name].double(), expected, rtol=tolerance, atol=tolerance * 10)


def slow_twin(data: list[dict[str, Tensor]], shared: SharedGroup) -> Tensor:
    """The output of one member's rows, from everybody's tensors: all tiles are computed here, and then merged."""
    kernel = MathKernel()
    names = ("q", "k", "v")
    slices = []  # per member, its rows of every sequence, front segment then back segment
    for member in range(shared.size):
        bounds = enumerate(shared.bounds[member].tolist())
        rows = [(index, start, stop) for index, own in bounds for start, stop in own]
        slices.append([torch.cat([data[i][name][a:b] for i, a, b in rows]) for name in names])
    own = slices[shared.member]
    lengths = member_tokens(shared.lengths, shared.weights)[:, shared.member]
    trees = Forest.without_trees(shared.sequences, shared.lengths)
    out, lse = kernel.forward(*own, causal_triangles(lengths), WIDTH**-0.5)
    for other in range(shared.size):
        if other == shared.member:
            continue
        for blocks in filter(None, blocks_between(shared, trees, shared.member, other)):
            part = kernel.forward(own[0], *slices[other][1:], blocks, WIDTH**-0.5)
            merge_rows(out, lse, blocks.query_rows(out.device), *part)
    return out


@pytest.mark.parametrize(("size", "columns"), [(4, 2), (6, 3), (6, 2)])
def test_gathering_everything_and_computing_every_tile_alone_gives_the_same(size: int, columns: int) -> None:
    lengths = [29, 3, 50]
    data = inputs(lengths, torch.float64)
    plan = grid_plan(lengths, size, columns)
    ours, _ = attend(plan, data, "math")
    for rank in range(size):
        (micro_batch,) = RankPlan.of(plan, rank).micro_batches
        assert micro_batch.shared is not None
        segments = zip(
            micro_batch.segment_sequences, micro_batch.segment_starts, micro_batch.segment_stops, strict=True
        )
        own = torch.cat([ours[sequence]["out"][start:stop] for sequence, start, stop in segments])
        torch.testing.assert_close(own, slow_twin(data, micro_batch.shared), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    one_in(27, [(shape, dtype) for dtype in (torch.float32, torch.bfloat16) for shape in SHAPES]),
)
def test_a_grid_sends_what_the_formula_says_to_the_byte(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The docstring of ``attention.rings.grid``, summed over slices: each is as long as it is."""
    size, columns = shape
    rows, b, w = size // columns, dtype.itemsize, 4
    _, sent = attend(grid_plan([103], size, columns), inputs([103], dtype))
    forward = (rows - 1) * KV_HEADS * 2 * WIDTH * b + (columns - 1) * HEADS * (2 * WIDTH * b + w)
    backward = (rows - 1) * KV_HEADS * 2 * WIDTH * (b + w)
    backward += (columns - 1) * HEADS * (2 * WIDTH * b + WIDTH * w + 2 * w)
    assert sum(sent) == 103 * (forward + backward)


@pytest.mark.parametrize(("size", "columns"), one_in(4, [(4, 2), (8, 2), (8, 4), (16, 4)]))
def test_in_bf16_a_grid_is_as_exact_as_a_ring(size: int, columns: int) -> None:
    """Its members round more partial outputs, and fewer sums of gradients."""
    assert output_error(size, columns) <= 1.5 * output_error(size, 1)
    for name in ("q", "k", "v"):
        ring, grid = (gradient_errors(size, torch.bfloat16, shape, (name,)) for shape in (1, columns))
        assert grid <= 1.5 * ring


def output_error(size: int, columns: int) -> float:
    """``|out - fp64's| / |fp64's|`` of a sequence over all ranks in bf16."""
    data = inputs([16 * size + 1], torch.bfloat16)
    ours, _ = attend(grid_plan([16 * size + 1], size, columns), data, "math")
    exact = reference_attention(*(data[0][name].double() for name in ("q", "k", "v")), [16 * size + 1])
    return float((ours[0]["out"].double() - exact).norm() / exact.norm())


@examples(10, 100)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1e-30, 1e-20, 1.0, 1e20]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_an_equivalent_output_has_the_same_delta(seed: int, size: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dout = (torch.randn(7, 3, 16, generator=generator, dtype=torch.float64) * size).to(dtype)
    dout[0] = 0  # as for a token without a target
    out = torch.randn(7, 3, 16, generator=generator, dtype=torch.float64).to(dtype)
    delta = (dout.to(wide) * out.to(wide)).sum(dim=-1)
    ours = (dout.to(wide) * _equivalent_output(dout, delta).to(wide)).sum(dim=-1)
    assert torch.isfinite(ours).all()
    assert (ours[0] == 0).all()
    # Half a unit in the last place of the output's dtype, and some of the sum's.
    bound = torch.finfo(dtype).eps + 16 * torch.finfo(wide).eps
    assert ((ours - delta).abs() <= bound * delta.abs()).all()


def test_columns_are_part_of_a_plans_fingerprint_and_file(tmp_path) -> None:
    plan = grid_plan([40, 30], 4, 2)
    save_plan(plan, tmp_path / "plan.npz")
    assert load_plan(tmp_path / "plan.npz").digest() == plan.digest()
    assert plan.digest() != grid_plan([40, 30], 4, 1).digest()


def test_columns_that_do_not_divide_the_ranks_are_refused() -> None:
    for columns in (1, 2, 3, 6):
        verify(grid_plan([60], 6, columns))
    with pytest.raises(PlanError, match=r"group 0 has 6 ranks in 4 columns. Some rows of its grid would lack a member"):
        verify(grid_plan([60], 6, 4))
    with pytest.raises(PlanError, match=r"group_columns\[0\] is 0, below 1"):
        verify(replace(grid_plan([60], 6, 2), group_columns=np.array([0])))
