"""Faults of collectives, planted one by one, on plans whose ranks differ as much as plans may.

Every test first lets the real runtime's programs finish. So a fault like these, made by mistake, fails here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
from torch import Tensor

from bytescale.plan import RankPlan
from bytescale.runtime import token_shards
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.buckets import Bucket, BucketCollectives
from tests.nccl.recorder import Event, Log, RecordedGroup
from tests.nccl.steps import uneven
from tests.nccl.test_nccl import assert_finishes, recorded

MESHES = [MeshShape(hdp=2), MeshShape(hdp=3), MeshShape(hdp=2, tp=4), MeshShape(pp=2, hdp=2)]
COUNTS = {2: [1, 2], 3: [2, 1, 4]}
"""Micro-batches of each rank: of some the last is shared, and others go on alone."""
LENGTHS = [9, 1, 5, 13]
"""In a micro-batch of 1 or 5 tokens, some of four tensor-parallel ranks have no rows."""


def programs(mesh: MeshShape, lengths: Sequence[int] = LENGTHS) -> list[list[Event]]:
    """Two steps whose gradients are reduced while ranks compute."""
    return recorded(uneven(COUNTS[mesh.hdp], lengths), mesh, bucket_bytes=1)


def amid_rings() -> AbstractContextManager:
    """All ranks reduce during the last backward of their first stage, also where it exchanges messages."""

    def always(rank_plan: RankPlan, stage: int) -> bool:
        return stage == 0 and bool(rank_plan.micro_batches)

    return patch("bytescale.runtime.optimizer.buckets.last_backward_is_silent", always)


def in_reverse() -> AbstractContextManager:
    """Odd ranks reduce neighbouring buckets of one size in the other order."""
    reduce_from = BucketCollectives.reduce_from

    def swapped(self: BucketCollectives, start: int) -> None:
        left = self._to_reduce
        if self.group.rank % 2 and len(left) > 1 and left[-2].start >= start:
            one, other = left[-2:]
            if one.stop - one.start == other.stop - other.start:
                left[-2:] = [other, one]
                start = min(start, one.start)
        reduce_from(self, start)

    return patch.object(BucketCollectives, "reduce_from", swapped)


def without_rows() -> AbstractContextManager:
    """A tensor-parallel rank without rows takes no part in gathers of rows."""
    gather = token_shards._all_rows

    def skipping(rows: Tensor, tp: RankGroup, num_tokens: int) -> Tensor:
        return gather(rows, tp, num_tokens) if len(rows) else rows.new_zeros(num_tokens, *rows.shape[1:])

    return patch.object(token_shards, "_all_rows", skipping)


def idle_without_gather() -> AbstractContextManager:
    """A rank that reduces without a forward before it takes no part in gathers of parameters."""
    gather = BucketCollectives.gather

    def skipping(self: BucketCollectives, bucket: Bucket) -> None:
        if self.group.rank:
            gather(self, bucket)

    return patch.object(BucketCollectives, "gather", skipping)


@pytest.mark.parametrize(
    ("shape", "nodes", "used"),
    [
        (MeshShape(hdp=9), [0] * 8 + [1], 8),  # one rank is alone on its node
        (MeshShape(hdp=6, pp=4), [rank // 8 for rank in range(24)], 12),  # two HDP groups of four lie inside nodes
        (MeshShape(hdp=4, tp=2), [0, 0, 0, 0, 1, 1, 1, 1], 8),
        (MeshShape(hdp=4), [0, 0, 0, 0], 0),
        (MeshShape(hdp=3), [0, 1, 2], 0),
    ],
    ids=str,
)
def test_all_ranks_make_equally_many_groups(shape: MeshShape, nodes: list[int], used: int) -> None:
    """Making one splits the communicator of all ranks, which waits for all of them."""
    made, with_node = dict[int, list[tuple[int, ...]]](), 0
    for rank in range(shape.size):
        log, groups = Log(rank), made.setdefault(rank, [])

        def make(name: str, ranks: Sequence[int], log: Log = log, groups: list = groups) -> RecordedGroup:
            groups.append(tuple(ranks))
            return RecordedGroup(log, name, ranks)

        world = RankGroup(RecordedGroup(log, "world", range(shape.size)))
        mesh = Mesh.of(world, shape, make, nodes=nodes)
        with_node += mesh.node is not mesh.hdp
    assert len({len(groups) for groups in made.values()}) == 1
    assert with_node == used


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_that_differ_finish_under_nccls_rules(mesh: MeshShape) -> None:
    assert_finishes(programs(mesh))


@pytest.mark.parametrize(
    ("fault", "mesh", "words"),
    [
        (amid_rings, MESHES[0], "everything that its device has been given"),
        (amid_rings, MESHES[1], "everything that its device has been given"),
        (in_reverse, MESHES[0], "different collectives"),
        (without_rows, MESHES[2], "different numbers of collectives|different collectives"),
        (idle_without_gather, MESHES[1], "different numbers of collectives"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_fault_is_caught(fault: Callable[[], AbstractContextManager], mesh: MeshShape, words: str) -> None:
    with fault():
        wrong = programs(mesh)
    with pytest.raises(AssertionError, match=words):
        assert_finishes(wrong)
