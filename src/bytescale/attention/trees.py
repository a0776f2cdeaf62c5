"""The blocks of documents, and of trees of them (``plan.trees``), on a member of a group; nodes of trees merged.

A member of a group holds a front and a back segment of every sequence, and of a sequence that it has alone all rows. A
range of rows of a sequence is one range of the rows that a member holds of it, because both have the same order. So the
blocks of any queries with any keys are those of the whole sequence, cut to what is held.

Of a document alone, by the order of segments, a member sees the front segment of those before it with both of its own,
and both segments of those behind it with its own back segment. With a window that is shorter than a path,
``rings.window`` has other blocks.

Shape letters: T rows of the micro-batch, S sequences, B blocks, H query heads, G key/value heads, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from bytescale.attention.blocks import BlockSet
from bytescale.attention.kernels import OfQueries, add_rows, merge_rows
from bytescale.attention.rings.grid import BlockWork
from bytescale.common.arrays import IntArray
from bytescale.plan import MicroBatch, SharedGroup
from bytescale.plan.trees import Forest


class _Held:
    """What a rank holds of some sequences: ``bounds [S, 2, 2]`` of two segments each, one behind the other."""

    def __init__(self, bounds: IntArray) -> None:
        counts = (bounds[:, :, 1] - bounds[:, :, 0]).sum(axis=1)
        self.bounds, self.first = bounds, np.cumsum(counts) - counts

    def rows(self, sequence: IntArray, ranges: IntArray) -> IntArray:
        """``[B, 2]`` rows of the rank, from ranges ``[B, 2]`` of rows of ``sequence [B]``."""
        bounds = self.bounds[sequence][:, None]
        inside = np.clip(ranges[:, :, None], bounds[..., 0], bounds[..., 1]) - bounds[..., 0]
        return inside.sum(axis=2) + self.first[sequence][:, None]


def own_blocks(micro_batch: MicroBatch, trees: Forest) -> tuple[BlockSet, list[BlockSet]]:
    """The blocks of a rank's own rows: the triangles of documents, and by depth the rectangles of nodes."""
    shared, alone = micro_batch.shared, micro_batch.local_lengths
    bounds = [np.stack([alone * 0, alone, alone, alone], axis=1).reshape(-1, 2, 2)]
    if shared is not None:
        bounds.insert(0, shared.bounds[shared.member])
    held = _Held(np.concatenate(bounds))
    triangles = held.rows(trees.sequence_of, trees.triangles)
    return BlockSet.of(triangles, triangles, causal=True), _rectangles(trees, held, held)


def blocks_between(shared: SharedGroup, trees: Forest, member: int, source: int) -> list[BlockSet]:
    """The blocks in which queries of ``member`` see keys of ``source``, another one; ``trees``: of the group."""
    queries, keys = (_Held(shared.bounds[one]) for one in (member, source))
    sequence, ranges = trees.sequence_of, trees.triangles
    # Rows that one document adds: both segments see the front of a member before; the back sees all of one behind.
    seeing, seen = ranges.copy(), ranges.copy()
    if source < member:
        seen[:] = np.minimum(seen, keys.bounds[sequence, 0, 1][:, None])
    else:
        seeing[:] = np.maximum(seeing, queries.bounds[sequence, 1, 0][:, None])
    own = BlockSet.of(queries.rows(sequence, seeing), keys.rows(sequence, seen), causal=False)
    return [own, *_rectangles(trees, queries, keys)]


def _rectangles(trees: Forest, queries: _Held, keys: _Held) -> list[BlockSet]:
    found = [
        BlockSet.of(queries.rows(sequence, seeing), keys.rows(sequence, seen), causal=False)
        for sequence, seeing, seen in trees.nodes
    ]
    return [blocks for blocks in found if blocks]


def add_nodes(
    results: tuple[Tensor, Tensor], inputs: tuple[Tensor, Tensor, Tensor], nodes: Sequence[BlockSet], work: BlockWork
) -> tuple[Tensor, Tensor]:
    """Merge the rectangles of ``nodes`` into ``out [T, H, Dv]`` and ``lse [T, H]``, in the dtype of sums."""
    out, lse = results
    wide = out.to(lse.dtype)
    for blocks in nodes:
        part_out, part_lse = work.forward(*inputs, blocks)
        merge_rows(wide, lse, blocks.query_rows(lse.device), part_out, part_lse)
    return wide.to(out.dtype), lse


def add_node_gradients(
    gradients: tuple[Tensor, Tensor, Tensor],
    queries: OfQueries,
    keys: tuple[Tensor, Tensor],
    nodes: Sequence[BlockSet],
    work: BlockWork,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add the rectangles' gradients to ``dq, dk, dv``, in the dtype of sums. ``queries``: of the whole softmax."""
    dq, dk, dv = (gradient.to(queries.lse.dtype) for gradient in gradients)
    for blocks in nodes:
        of_queries, of_keys, of_values = work.backward(queries, *keys, blocks)
        add_rows(dq, blocks.query_rows(dq.device), of_queries)
        rows = blocks.key_rows(dk.device)
        add_rows(dk, rows, of_keys)
        add_rows(dv, rows, of_values)
    return dq.to(gradients[0].dtype), dk.to(gradients[1].dtype), dv.to(gradients[2].dtype)
