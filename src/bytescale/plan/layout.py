"""How a sequence is cut over the members of its slice group (paper section 7, made exact for any length).

A sequence of ``s`` tokens shared by ``N`` members is cut into ``2N`` segments. Member ``i`` holds segments ``i`` and
``2N-1-i``, so that every member has 1/N of the tokens and 1/N of the causal mask's area::

    N = 3      | 0 | 1 | 2 | 2 | 1 | 0 |     member that holds each segment, front to back

Nothing has to divide anything. With weights ``w`` (all 1 unless members differ in speed) and ``W_i`` the sum of the
first ``i`` of them, of ``W`` in all, member ``i`` holds ``n_i = floor(W_{i+1} s / W) - floor(W_i s / W)`` tokens, of
which ``ceil(n_i / 2)`` are its front segment and the rest its back segment. With equal weights every ``n_i`` is
``floor(s/N)`` or ``ceil(s/N)``.

Shape letters: K sequences of a group, N members.
"""

from __future__ import annotations

import numpy as np

from bytescale.common.arrays import IntArray


def member_tokens(lengths: IntArray, weights: IntArray) -> IntArray:
    """``[K, N]`` int64 tokens of each sequence that each member holds; rows sum to the lengths.

    ``lengths [K]`` are int64 tokens, and ``weights [N]`` the members' shares, all integers >= 1.
    """
    return np.diff(_cuts(lengths, weights, len(weights)), axis=1)


def segment_bounds(lengths: IntArray, weights: IntArray) -> IntArray:
    """``[N, K, 2, 2]`` int64: of each member and sequence the front, then the back segment, ``[start, stop)`` tokens.

    Either may be empty.
    """
    tokens = member_tokens(lengths, weights).T
    back = tokens // 2
    front = tokens - back
    starts = np.cumsum(front, axis=0) - front
    stops = lengths - (np.cumsum(back, axis=0) - back)
    return np.stack([starts, starts + front, stops - back, stops], axis=-1).reshape(*tokens.shape, 2, 2)


def member_bounds(lengths: IntArray, weights: IntArray, member: int) -> IntArray:
    """``[K, 2, 2]``: ``segment_bounds(...)[member]``, without the members behind it: groups may have thousands."""
    cuts = _cuts(lengths, weights, member + 1)
    tokens = np.diff(cuts, axis=1)
    back = tokens // 2
    start, stop = cuts[:, member] - back[:, :member].sum(axis=1), lengths - back[:, :member].sum(axis=1)
    own = back[:, member]
    return np.stack([start, start + tokens[:, member] - own, stop - own, stop], axis=-1).reshape(-1, 2, 2)


def _cuts(lengths: IntArray, weights: IntArray, count: int) -> IntArray:
    """``[K, count + 1]`` tokens of each sequence that the first 0, 1, .. ``count`` members hold together."""
    edges = np.concatenate(([0], np.cumsum(weights, dtype=np.int64)))
    return np.asarray(lengths, dtype=np.int64)[:, None] * edges[: count + 1] // edges[-1]
