"""Tensor parallelism whose messages travel beside products gives the bits of its slow twin, and one process's numbers.

``tests/hf/test_tensor_parallel.py`` has the parts of models that it is applied to.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.saved.checkpointing import KeptAttention, apply_checkpointing
from bytescale.runtime.token_shards import TokenShards, own_rows
from tests.helpers.decoder import FeedForward, Sizes
from tests.helpers.ranks import run_ranks
from tests.nccl.recorder import Compute, Post, Wait, record

ROWS = {"uneven": 66, "fewer rows than ranks": 3, "even": 64}
SLICED, WHOLE = 1.0, 1e18
"""The least work of a slice: up to four slices of the rows above, or one."""


class Block(FeedForward):
    """A feed-forward part on the residual stream; ``shards``: of which this rank has a part of every matrix."""

    def __init__(self, sizes: Sizes, shards: TokenShards | None = None) -> None:
        super().__init__(sizes)
        self.shards = shards

    def forward(self, rows: Tensor) -> Tensor:
        if self.shards is None:
            return rows + super().forward(rows)
        gate, up = self.shards.gather_and_project(rows, (self.gate_proj, self.up_proj))
        return rows + self.shards.project_and_scatter(nn.functional.silu(gate) * up, self.down_proj)


def blocks_of(dtype: torch.dtype, parts: int = 1, part: int = 0, shards: TokenShards | None = None) -> list[Block]:
    """Two blocks, or one of ``parts`` of each."""
    generator, blocks = torch.Generator().manual_seed(0), []
    for _ in range(2):
        block = Block(Sizes(hidden_size=12, ffn_hidden_size=16 // parts), shards)
        for name, parameter in block.named_parameters():
            whole = torch.randn((12, 16) if name.startswith("down") else (16, 12), generator=generator)
            own = whole.chunk(parts, dim=1 if name.startswith("down") else 0)[part]
            parameter.data = (0.3 * own).to(dtype)
        blocks.append(block)
    return blocks


def numbers_of(blocks: list[Block], rows: Tensor, upstream: Tensor) -> list[Tensor]:
    """Result, gradient of the rows and of every weight."""
    rows = rows.requires_grad_()
    out = blocks[1](blocks[0](rows))
    out.backward(upstream)
    gradients = [rows.grad, *(parameter.grad for block in blocks for parameter in block.parameters())]
    return [out.detach(), *(gradient for gradient in gradients if gradient is not None)]


def inputs_of(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(num_rows, 12, generator=generator).to(dtype) for _ in range(2))  # type: ignore[return-value]


Case = tuple[str, torch.dtype, str, bool, float]
"""Rows, dtype, checkpointing, whether messages overlap, the least work of a slice."""


def steps(tp: int, cases: list[Case]) -> dict[Case, list[list[Tensor]]]:
    """The numbers of every rank, in all cases."""

    def one_rank(group: RankGroup) -> dict[Case, list[Tensor]]:
        found = {}
        for case in cases:
            name, dtype, mode, overlap, least_work = case
            shards = TokenShards(group, overlap=overlap, least_work=least_work)
            shards.begin(ROWS[name])
            own = own_rows(ROWS[name], group)
            blocks = blocks_of(dtype, tp, group.rank, shards)
            apply_checkpointing(blocks, mode, KeptAttention())  # type: ignore[arg-type]
            rows, upstream = (given[own.start : own.stop].clone() for given in inputs_of(ROWS[name], dtype))
            found[case] = numbers_of(blocks, rows, upstream)
        return found

    ranks = run_ranks(tp, one_rank)
    return {case: [found[case] for found in ranks] for case in cases}


@pytest.mark.parametrize("tp", [2, 4])
def test_overlap_keeps_the_bits(tp: int) -> None:
    twins = list(product(ROWS, (torch.float32, torch.float64), ("none", "full")))
    found = steps(tp, [(*twin, overlap, SLICED) for twin in twins for overlap in (False, True)])
    for twin in twins:
        for ours, theirs in zip(found[*twin, True, SLICED], found[*twin, False, SLICED], strict=True):
            assert len(ours) == len(theirs) == 2 + 6
            assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("tp", [2, 4])
def test_slices_give_the_numbers_of_one_process(tp: int) -> None:
    cases: list[Case] = [(name, torch.float64, "none", True, size) for name in ROWS for size in (SLICED, WHOLE)]
    for (name, *_), found in steps(tp, cases).items():
        out, d_rows, *weights = numbers_of(blocks_of(torch.float64), *inputs_of(ROWS[name], torch.float64))
        for place, whole in enumerate((out, d_rows)):
            torch.testing.assert_close(torch.cat([own[place] for own in found]), whole, rtol=1e-12, atol=1e-12)
        for place, whole in enumerate(weights):
            parts = torch.cat([own[2 + place] for own in found], dim=1 if place % 3 == 2 else 0)
            torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def collectives_beside_computation(least_work: float, mode: Any, *, overlap: bool = True) -> int:
    """How many collectives of rank 0 have computation between their start and the wait for them."""

    def one_rank(mesh: Mesh) -> None:
        shards = TokenShards(mesh.tp, overlap=overlap, least_work=least_work)
        shards.begin(8)
        blocks = blocks_of(torch.float32, 2, mesh.tp.rank, shards)
        apply_checkpointing(blocks, mode, KeptAttention())
        numbers_of(blocks, *inputs_of(4, torch.float32))

    events = record(MeshShape(hdp=1, tp=2), one_rank)[0]
    started = {event.number: place for place, event in enumerate(events) if isinstance(event, Post)}
    waits = [(started[event.number], place) for place, event in enumerate(events) if isinstance(event, Wait)]
    return sum(any(isinstance(event, Compute) for event in events[first:last]) for first, last in waits)


@pytest.mark.parametrize(
    ("mode", "least_work", "expected"),
    [
        ("none", WHOLE, 1),  # the sum of gradients alone, behind the gradients of weights
        # Four slices: all gathers but the first, in both directions, and all sums, although the last one has only the
        # copy of another one's result beside it.
        ("none", SLICED, 1 + 3 + 3 + 4),
        ("full", SLICED, 1 + 3 + 3 + 4 + 3),  # forward once more, up to the sum behind the last product
    ],
)
def test_messages_travel_beside_products(mode: str, least_work: float, expected: int) -> None:
    """Or else the comparison of bits would compare the slow twin with itself."""
    num_blocks = 2
    assert collectives_beside_computation(least_work, mode) == expected * num_blocks
    assert collectives_beside_computation(least_work, mode, overlap=False) == 0


def test_slices_are_worth_their_messages() -> None:
    """By the time of products: q, k and v of 7B at tp 8 take 32 us for 1,024 tokens on a GPU, less than a message."""
    shards = TokenShards(RankGroup())
    for device, counts in (("meta", {1024: 1, 4096: 2, 65536: 4}), ("cpu", {4: 1, 16: 2, 64: 4})):
        weight = torch.empty(3 * 512, 4096, device=device)
        for num_tokens, count in counts.items():
            shards.begin(num_tokens)
            assert len(list(shards._slices([weight]).of(torch.empty(num_tokens, 1)))) == count
