"""Block attention in tiles of matrix products: every rule, every device and dtype, memory O(rows x tile).

It runs where no flash kernel takes a rule (``choose``). Tiles outside of a block's band are left out. The softmax of a
row of tiles runs from its last keys to its first: the tile that comes first holds the own key of every query, so that
the running maximum is finite. Otherwise this is FlashAttention (Dao et al. 2022, Algorithms 1 and 4).

Shape letters: C query rows and E key rows of a tile, H query heads, G key/value heads, R = H / G, D width of queries
and keys, Dv of values. Inside, heads come first: queries ``[G, R C, D]``, keys ``[G, E, D]``, scores ``[G, R C, E]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from bytescale.attention.blocks import BlockSet
from bytescale.attention.kernels import AttentionKernel, OfQueries, lse_dtype, unseen_keys

TILE_ROWS = 256
"""Query rows of a tile; a row of tiles has as many keys at a time, or twice as many if those are all."""
SMALLEST_TILE = 32
"""A short window makes tiles shorter, down to this: C queries have C - 1 keys more than a window."""


@dataclass(frozen=True)
class TiledKernel:
    """``kernels.AttentionKernel`` in tiles.

    Sums and scores are in the LSE's dtype. On CUDA, matrix products are as exact as PyTorch's settings for fp32 say.

    Attributes:
        soft_cap: bound of the scores (``rules.AttentionRules``).
        plain: what computes the blocks for which neither the window nor the cap makes a difference; None: the same.
    """

    soft_cap: float | None = None
    plain: AttentionKernel | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockSet, scale: float) -> tuple[Tensor, Tensor]:
        out = q.new_empty(blocks.num_query_rows, q.shape[1], v.shape[2])
        lse = q.new_empty(blocks.num_query_rows, q.shape[1], dtype=lse_dtype(q.dtype))
        tiles = _Tiles(scale, self.soft_cap)
        for queries, keys, rows, key_rows in blocks.places():
            block = _alone(blocks, rows, key_rows)
            if self.plain is not None and self._is_plain(block):
                out[rows], lse[rows] = self.plain.forward(q[queries], k[keys], v[keys], block, scale)
            else:
                tiles.forward(q[queries], k[keys], v[keys], block, out[rows], lse[rows])
        return out, lse

    def backward(
        self, queries: OfQueries, k: Tensor, v: Tensor, blocks: BlockSet, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out, lse = queries
        dq = q.new_empty(blocks.num_query_rows, *q.shape[1:])
        dk = k.new_empty(blocks.num_key_rows, *k.shape[1:])
        dv = v.new_empty(blocks.num_key_rows, *v.shape[1:])
        tiles = _Tiles(scale, self.soft_cap)
        for own, keys, rows, key_rows in blocks.places():
            block = _alone(blocks, rows, key_rows)
            given = OfQueries(dout[own], q[own], out[own], lse[own]), k[keys], v[keys]
            if self.plain is not None and self._is_plain(block):
                parts = self.plain.backward(*given, block, scale)
            else:
                parts = tiles.backward(*given, block)
            dq[rows], dk[key_rows], dv[key_rows] = parts
        return dq, dk, dv

    def _is_plain(self, block: BlockSet) -> bool:
        """Whether a flash kernel without rules, whose triangles have as many keys as queries, computes the block."""
        if self.soft_cap is not None or not block.causal:
            return self.soft_cap is None
        short = block.window is None or block.num_key_rows <= block.window
        return short and block.num_query_rows == block.num_key_rows


def _alone(blocks: BlockSet, rows: slice, key_rows: slice) -> BlockSet:
    """A block of so many rows alone."""
    return BlockSet([(0, rows.stop - rows.start)], [(0, key_rows.stop - key_rows.start)], blocks.causal, blocks.window)


@dataclass
class _Tiles:
    """Computes blocks tile by tile; masks of tiles that look alike are made once."""

    scale: float
    soft_cap: float | None
    _masks: dict[tuple[int, int, int, int | None], Tensor] = field(default_factory=dict)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: BlockSet, out: Tensor, lse: Tensor) -> None:
        """``q [T, H, D]``, ``k [S, G, D]``, ``v [S, G, Dv]`` of one block; fills ``out [T, H, Dv]``, ``lse [T, H]``."""
        wide, heads = lse.dtype, k.shape[1]
        keys, values = _heads_first(k, wide), _heads_first(v, wide)
        for (start, stop), key_tiles in _rows_of_tiles(block):
            queries = self._scaled(_grouped(q[start:stop], heads, wide))
            largest = queries.new_full((*queries.shape[:2], 1), float("-inf"))
            total, weighted = torch.zeros_like(largest), queries.new_zeros(*queries.shape[:2], v.shape[2])
            for first, last in key_tiles:
                scores, _ = self._scores(queries, keys[:, first:last], block, (start, stop), (first, last))
                top = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
                weights = scores.sub_(top).exp_()
                kept = largest.sub_(top).exp_()
                total.mul_(kept).add_(weights.sum(dim=-1, keepdim=True))
                weighted.mul_(kept).baddbmm_(weights, values[:, first:last])
                largest = top
            out[start:stop] = _ungrouped(weighted.div_(total), stop - start)
            lse[start:stop] = _ungrouped(total.log_().add_(largest), stop - start)[..., 0]

    def backward(self, own: OfQueries, k: Tensor, v: Tensor, block: BlockSet) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the block's ``q [T, H, D]``, ``k [S, G, D]`` and ``v [S, G, Dv]``, the last two in wide sums."""
        dout, q, out, lse = own
        wide, heads = lse.dtype, k.shape[1]
        keys, values = _heads_first(k, wide), _heads_first(v, wide)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        for (start, stop), key_tiles in _rows_of_tiles(block):
            plain_queries = _grouped(q[start:stop], heads, wide)
            queries, d = self._scaled(plain_queries), _grouped(dout[start:stop], heads, wide)
            # d(softmax): P * (dP - rowsum(dO * O)), with O of the whole softmax.
            delta = (d * _grouped(out[start:stop], heads, wide)).sum(dim=-1, keepdim=True)
            sums = _grouped(lse[start:stop, :, None], heads, wide)
            d_queries = torch.zeros_like(queries)
            for first, last in key_tiles:
                tile = slice(first, last)
                scores, slope = self._scores(queries, keys[:, tile], block, (start, stop), (first, last))
                weights = scores.sub_(sums).exp_()
                dv[:, tile].baddbmm_(weights.transpose(1, 2), d)
                d_scores = torch.bmm(d, values[:, tile].transpose(1, 2)).sub_(delta).mul_(weights)
                if slope is not None:
                    d_scores.mul_(slope)
                d_queries.baddbmm_(d_scores, keys[:, tile])
                dk[:, tile].baddbmm_(d_scores.transpose(1, 2), plain_queries)
            dq[start:stop] = _ungrouped(d_queries.mul_(self.scale), stop - start)
        return dq, dk.mul_(self.scale).transpose(0, 1), dv.transpose(0, 1)

    def _scaled(self, queries: Tensor) -> Tensor:
        """Queries whose products with keys are scores, or the arguments of a cap's tanh."""
        return queries * (self.scale if self.soft_cap is None else self.scale / self.soft_cap)

    def _scores(
        self, queries: Tensor, keys: Tensor, block: BlockSet, rows: tuple[int, int], key_rows: tuple[int, int]
    ) -> tuple[Tensor, Tensor | None]:
        """Scores of one tile, -inf where a query does not look, and the slope of the cap there, if any."""
        scores, slope = torch.bmm(queries, keys.transpose(1, 2)), None
        if self.soft_cap is not None:
            scores.tanh_()
            slope = 1 - scores * scores
            scores.mul_(self.soft_cap)
        unseen = self._unseen(block, rows, key_rows, scores.device)
        if unseen is not None:
            scores.view(-1, *unseen.shape).masked_fill_(unseen, float("-inf"))
        return scores, slope

    def _unseen(
        self, block: BlockSet, rows: tuple[int, int], key_rows: tuple[int, int], device: torch.device
    ) -> Tensor | None:
        """``[C, E]`` true where a query of the tile does not see a key; None where it sees all of them."""
        if not block.causal:
            return None
        num_queries, num_keys = rows[1] - rows[0], key_rows[1] - key_rows[0]
        own = rows[0] + block.num_key_rows - block.num_query_rows - key_rows[0]  # the first query's key, in the tile
        window = block.window
        inside = own + 1 >= num_keys and (window is None or own + num_queries - 1 < window)
        if inside:
            return None
        key = (num_queries, num_keys, own, window)
        if key not in self._masks:
            self._masks[key] = unseen_keys(num_queries, num_keys, own, window, device)
        return self._masks[key]


def _rows_of_tiles(block: BlockSet) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Ranges of query rows, and for each the ranges of the key rows that they see, the last keys first."""
    num_queries, num_keys = block.num_query_rows, block.num_key_rows
    size = TILE_ROWS if block.window is None else max(SMALLEST_TILE, min(TILE_ROWS, block.window))
    own = num_keys - num_queries
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        last = stop + own if block.causal else num_keys
        first = 0 if block.window is None else max(0, start + own - block.window + 1)
        step = last - first if last - first <= 2 * size else size
        edges = [*range(last, first, -step), first]
        yield (start, stop), [(low, high) for high, low in pairwise(edges)]


def _heads_first(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """``[S, G, D]`` -> contiguous ``[G, S, D]``."""
    return rows.transpose(0, 1).to(dtype).contiguous()


def _grouped(rows: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """``[C, G R, D]`` -> contiguous ``[G, R C, D]``."""
    return rows.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).to(dtype).flatten(1, 2)


def _ungrouped(rows: Tensor, count: int) -> Tensor:
    """``[G, R C, D]`` -> ``[C, G R, D]``, C = ``count``."""
    return rows.unflatten(1, (-1, count)).permute(2, 0, 1, 3).flatten(1, 2)
