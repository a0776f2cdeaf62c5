"""Attention whose bits depend on a document alone: fixed tiles of queries against fixed blocks of keys.

A document's positions are cut into tiles of ``QUERIES`` and blocks of ``KEYS``, both counted from its first token. A
tile, filled up to its full size, meets its blocks in rising order, and partial results are merged in that order::

    keys       0 ... 127 | 128 ... 255 |        the tile of the queries 128 to 191 takes these two blocks,
    queries                128 . 191            and query 130 stands at place 2 of it in every plan

So each product has one shape, in which a row has one place, whoever holds the row and whatever else is in the
micro-batch. The keys and values of earlier tokens come to the queries (``earlier``), all of a document at once: memory
grows with the document's length on each rank that has a part of it. Backward is the plan's own.

Shape letters: T rows of the micro-batch, S rows of a path, H query heads, G key/value heads, D width of queries and
keys, Dv of values; t and b the rows of a tile and of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from bytescale.attention.earlier import EarlierRows
from bytescale.attention.kernels import lse_dtype, unseen_keys
from bytescale.attention.rings.messages import Kind
from bytescale.attention.rules import AttentionRules
from bytescale.attention.sinks import join_sinks

QUERIES, KEYS = 64, 128


@_disable_current_modes()
def forward(
    earlier: EarlierRows, q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``q [T, H, D]``, ``k [T, G, D]``, ``v [T, G, Dv]`` -> ``out [T, H, Dv]``, ``lse [T, H]``, with the sinks.

    All members of a group have to call it together.
    """
    wide, heads = lse_dtype(q.dtype), k.shape[1]
    out, lse = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=wide)
    rows = earlier.fetch(torch.cat([k, v], dim=2).flatten(1), Kind.FORWARD_KV).unflatten(1, (heads, -1))
    for path in earlier.paths:
        start, stop = path.num_before, path.num_before + path.rows.stop - path.rows.start
        known = rows.new_zeros(heads, -(-stop // KEYS) * KEYS, rows.shape[2], dtype=wide)
        known[:, :stop] = rows[path.on(q.device)].transpose(0, 1)
        for first in range(start // QUERIES * QUERIES, stop, QUERIES):
            begin, end = max(first, start), min(first + QUERIES, stop)
            own = slice(path.rows.start + begin - start, path.rows.start + end - start)
            inside = slice(begin - first, end - first)
            tile = q.new_zeros(QUERIES, *q.shape[1:], dtype=wide)
            tile[inside] = q[own]
            results = _tile(tile, known, first, rules)
            of_tile, lse_of_tile = results if sinks is None else join_sinks(*results, sinks)
            out[own], lse[own] = of_tile[inside], lse_of_tile[inside]
    return out, lse


def _tile(q: Tensor, known: Tensor, first: int, rules: AttentionRules) -> tuple[Tensor, Tensor]:
    """``q [t, H, D]`` from position ``first`` on, ``known [G, S, D + Dv]`` -> ``out [t, H, Dv]``, ``lse [t, H]``."""
    width, heads = q.shape[2], len(known)
    rows = q.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).reshape(heads, -1, width)  # [G, H / G t, D]
    largest = rows.new_full((*rows.shape[:2], 1), -torch.inf)
    total, sums = torch.zeros_like(largest), rows.new_zeros(*rows.shape[:2], known.shape[2] - width)
    reach = first if rules.window is None else min(first, rules.window - 1)
    for start in range((first - reach) // KEYS * KEYS, first + QUERIES, KEYS):
        block = known[:, start : start + KEYS].contiguous()
        scores = rows @ block[..., :width].mT * rules.scale_of(q)
        if rules.soft_cap is not None:
            scores = torch.tanh(scores / rules.soft_cap) * rules.soft_cap
        unseen = unseen_keys(len(q), KEYS, first - start, rules.window, q.device)
        scores.unflatten(1, (-1, len(q))).masked_fill_(unseen, -torch.inf)
        higher = torch.maximum(largest, scores.amax(2, keepdim=True))
        shift = higher.masked_fill(higher == -torch.inf, 0)  # a window may hide the whole block from a query
        weights, kept = (scores - shift).exp(), (largest - shift).exp()
        total, sums = total * kept + weights.sum(2, keepdim=True), sums * kept + weights @ block[..., width:]
        largest = higher
    out, lse = (
        part.unflatten(1, (-1, len(q))).permute(2, 0, 1, 3).flatten(1, 2)
        for part in (sums / total, largest + total.log())
    )
    return out, lse[..., 0]
