"""Tensor parallelism whose messages travel beside products gives the bits of its slow twin."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from bytescale.runtime import MeshShape, RankGroup, TokenShards
from bytescale.train.parts import own_model
from tests.helpers.effort import one_in
from tests.helpers.steps import StepOutcome, random_batch
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


def step(overlap: bool, mesh: MeshShape, dtype: torch.dtype, lengths: list[int], **options: Any) -> StepOutcome:
    shape = mesh_shape(**options.pop("shape", {}))
    plan, batch = runnable_plan(lengths, mesh, seed=mesh.size), random_batch(lengths, shape.vocab_size, 0)

    def shards(tp: RankGroup) -> TokenShards:
        return TokenShards(tp, overlap=overlap)

    with patch.object(test_mesh_parity, "TokenShards", shards):
        return mesh_step(mesh, shape, dtype, batch, plan, **options)


def assert_same_bits(mesh: MeshShape, dtype: torch.dtype, lengths: list[int], **options: Any) -> None:
    plain, overlapped = (step(overlap, mesh, dtype, lengths, **options) for overlap in (False, True))
    assert plain.loss == overlapped.loss
    for name, gradient in plain.gradients.items():
        assert torch.equal(gradient, overlapped.gradients[name]), name
    assert any(gradient.any() for gradient in plain.gradients.values())


@pytest.mark.parametrize(("tp", "dtype", "checkpointing", "lengths"), one_in(5, CASES), ids=str)
def test_overlap_keeps_the_bits(tp: int, dtype: torch.dtype, checkpointing: str, lengths: str) -> None:
    assert_same_bits(MeshShape(hdp=1, tp=tp), dtype, LENGTHS[lengths], checkpointing=checkpointing)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (MeshShape(tp=2, pp=2, hdp=2), {"offload": True, "checkpointing": "attention"}),
        (MeshShape(hdp=1, tp=2), {"head_groups": 2, "shape": {"num_heads": 8, "num_kv_heads": 4}}),
        (MeshShape(tp=4, hdp=2), {"shape": MIXTURE}),
        (MeshShape(hdp=1, tp=2), {"shape": {"tie_embeddings": True}}),
    ],
    ids=str,
)
def test_overlap_keeps_the_bits_with_everything_else(mesh: MeshShape, options: dict[str, Any]) -> None:
    assert_same_bits(mesh, torch.float32, LENGTHS["uneven"], **options)


def collectives_beside_computation(mesh: MeshShape, overlap: bool, **options: Any) -> int:
    """How many collectives of rank 0 have computation between their start and the wait for them."""

    def shards(tp: RankGroup) -> TokenShards:
        return TokenShards(tp, overlap=overlap)

    with patch.object(own_model, "TokenShards", shards):
        events = recorded(uneven([1], [8]), mesh, **options)[0]
    started = {event.number: place for place, event in enumerate(events) if isinstance(event, Post)}
    waits = [(started[event.number], place) for place, event in enumerate(events) if isinstance(event, Wait)]
    return sum(any(isinstance(event, Compute) for event in events[first:last]) for first, last in waits)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_both_sums_of_a_layer_travel_beside_products(checkpointing: str) -> None:
    """Or else the comparison of bits would compare the slow twin with itself."""
    mesh, num_layers = MeshShape(hdp=1, tp=2), 2
    assert collectives_beside_computation(mesh, True, checkpointing=checkpointing) == 2 * num_layers
    assert collectives_beside_computation(mesh, False, checkpointing=checkpointing) == 0


def test_gathered_rows_with_another_use_are_refused() -> None:
    """The gradient of that use would be missing in the sum that has been started."""
    shards, linear = TokenShards(RankGroup()), torch.nn.Linear(2, 2, bias=False)
    shards.begin(3)
    rows = shards.gather(torch.ones(3, 2, requires_grad=True))
    (product,) = shards.project(rows, [linear])
    with pytest.raises(AssertionError, match="no other use"):
        (product.sum() + rows.sum()).backward()
