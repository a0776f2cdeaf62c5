"""Tensor parallelism whose messages travel beside products gives the bits of its slow twin."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import MeshShape
from bytescale.runtime.token_shards import TokenShards
from bytescale.train.parts import own_model
from tests.helpers.effort import one_in, one_of, pairs
from tests.helpers.steps import StepOutcome, random_batch, worst_relative_error
from tests.nccl.recorder import Compute, Post, Wait
from tests.nccl.steps import uneven
from tests.nccl.test_nccl import recorded
from tests.runtime import test_mesh_parity
from tests.runtime.test_mesh_parity import MIXTURE, mesh_shape, mesh_step, runnable_plan

LENGTHS = {"uneven": [33, 5, 18, 1, 9], "fewer tokens than ranks": [1, 2, 3], "even": [64]}
CASES = [
    (tp, dtype, checkpointing, lengths)
    for tp in (2, 4)
    for dtype in (torch.float32, torch.float64)
    for checkpointing in ("none", "full", "attention")
    for lengths in LENGTHS
]


SLICED, WHOLE = 8, 10**9
"""Rows per slice: up to four slices of the lengths above, or none."""


def step(
    overlap: bool,
    mesh: MeshShape,
    dtype: torch.dtype,
    lengths: list[int],
    *,
    rows_per_slice: int = SLICED,
    **options: Any,
) -> StepOutcome:
    shape = mesh_shape(**options.pop("shape", {}))
    plan, batch = runnable_plan(lengths, mesh, seed=mesh.size), random_batch(lengths, shape.vocab_size, 0)

    def shards(tp: RankGroup) -> TokenShards:
        return TokenShards(tp, overlap=overlap, rows_per_slice=rows_per_slice)

    with patch.object(test_mesh_parity, "TokenShards", shards):
        return mesh_step(mesh, shape, dtype, batch, plan, **options)


def assert_same_bits(mesh: MeshShape, dtype: torch.dtype, lengths: list[int], **options: Any) -> None:
    plain, overlapped = (step(overlap, mesh, dtype, lengths, **options) for overlap in (False, True))
    assert plain.loss == overlapped.loss
    for name, gradient in plain.gradients.items():
        assert torch.equal(gradient, overlapped.gradients[name]), name
    assert any(gradient.any() for gradient in plain.gradients.values())


@pytest.mark.parametrize(("tp", "dtype", "checkpointing", "lengths"), one_in(17, CASES), ids=str)
def test_overlap_keeps_the_bits(tp: int, dtype: torch.dtype, checkpointing: str, lengths: str) -> None:
    assert_same_bits(MeshShape(hdp=1, tp=tp), dtype, LENGTHS[lengths], checkpointing=checkpointing)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (MeshShape(tp=2, pp=2, hdp=2), {"offload": True, "checkpointing": "attention"}),
        (MeshShape(hdp=1, tp=2), {"head_groups": 2, "shape": {"num_heads": 8, "num_kv_heads": 4}}),
        *one_of(
            [(MeshShape(tp=n, hdp=2), {"shape": MIXTURE}) for n in (2, 4)], (MeshShape(tp=2, hdp=2), {"shape": MIXTURE})
        ),
        (MeshShape(hdp=1, tp=2), {"shape": {"tie_embeddings": True}}),
    ],
    ids=str,
)
def test_overlap_keeps_the_bits_with_everything_else(mesh: MeshShape, options: dict[str, Any]) -> None:
    assert_same_bits(mesh, torch.float32, LENGTHS["uneven"], **options)


@pytest.mark.parametrize(("tp", "lengths"), pairs([2, 4], list(LENGTHS)))
def test_slices_give_the_numbers_of_whole_messages(tp: int, lengths: str) -> None:
    mesh = MeshShape(hdp=1, tp=tp)
    sliced, whole = (
        step(True, mesh, torch.float64, LENGTHS[lengths], rows_per_slice=rows, checkpointing="full")
        for rows in (SLICED, WHOLE)
    )
    assert sliced.loss == pytest.approx(whole.loss, rel=1e-13)
    assert worst_relative_error(sliced.gradients, whole.gradients) < 1e-12


def collectives_beside_computation(mesh: MeshShape, rows_per_slice: int, overlap: bool = True, **options: Any) -> int:
    """How many collectives of rank 0 have computation between their start and the wait for them."""

    def shards(tp: RankGroup) -> TokenShards:
        return TokenShards(tp, overlap=overlap, rows_per_slice=rows_per_slice)

    with patch.object(own_model, "TokenShards", shards):
        events = recorded(uneven([1], [8]), mesh, **options)[0]
    started = {event.number: place for place, event in enumerate(events) if isinstance(event, Post)}
    waits = [(started[event.number], place) for place, event in enumerate(events) if isinstance(event, Wait)]
    return sum(any(isinstance(event, Compute) for event in events[first:last]) for first, last in waits)


@pytest.mark.parametrize(
    ("checkpointing", "rows_per_slice", "expected"),
    [
        ("none", WHOLE, 2),  # the sums of gradients alone, behind the gradients of weights
        # Two slices, two blocks: the second gather, in both directions, and both sums, although the last one has only
        # the copy of the first one's result beside it.
        ("none", 4, 2 + 2 * (1 + 1 + 2)),
        ("full", 4, 2 + 2 * (1 + 1 + 2) + 1 + 2 + 1),  # forward once more, up to the sum behind the feed-forward part
    ],
)
def test_messages_travel_beside_products(checkpointing: str, rows_per_slice: int, expected: int) -> None:
    """Or else the comparison of bits would compare the slow twin with itself."""
    mesh, num_layers = MeshShape(hdp=1, tp=2), 2
    options = {"rows_per_slice": rows_per_slice, "checkpointing": checkpointing}
    assert collectives_beside_computation(mesh, **options) == expected * num_layers
    assert collectives_beside_computation(mesh, overlap=False, **options) == 0
