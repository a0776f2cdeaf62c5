"""What a pipeline changes: the longest micro-batch of a rank costs p times its stage's time, not once (``evaluate``).

So long sequences take more ranks than memory and balance ask for: a shorter stage time tau spares (p - 1) tau on every
rank that holds one of them, until rings no longer hide. For a given tau the end is about

    T(tau) = ( sum of D t  +  local  +  (p - 1) * sum over R ranks of the longest t on each ) / R

with every long sequence on the fewest ranks that end it within tau, and longest upon longest, so that the groups with
the largest t cover the ranks once and each of these pays once. A grid of tau is tried, the best few are laid out.

Shape letters: L sequences that have to be shared for a tau, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bytescale.planner.target import degrees_within
from bytescale.planner.trial import Batch, num_shared

MIN_PACK = 8192
"""Tokens: packs are halved down to this."""
STEPS = 24
"""Levels tried, in geometric steps from all of the target down to one micro-batch of short sequences."""
LAID_OUT = 5
"""Of these, how many are laid out."""


class Level(NamedTuple):
    """A longest stage time and the end that it promises, seconds."""

    end: float
    longest: float


def pack_sizes(capacity: int) -> list[int | None]:
    """Tokens of whole sequences in one micro-batch that are tried: as many as fit, and halves of it.

    Fewer fill and drain a pipeline in less time, for more launches. Long ones make no difference to short capacities.
    """
    halvings = max(0, int(np.log2(max(capacity, 1) / MIN_PACK)))
    return [None, *(capacity >> halving for halving in range(1, halvings + 1))]


def pack_seconds(batch: Batch) -> float:
    """Time of a full micro-batch of whole sequences, the mean over the batch's tokens."""
    whole = batch.fewest == 1
    tokens = batch.lengths[whole].sum()
    return float(batch.local_seconds[whole].sum() / max(tokens, 1) * min(batch.pack_tokens, tokens))


def levels(batch: Batch, num_stages: int) -> list[Level]:
    """The ``LAID_OUT`` most promising of ``STEPS`` levels, best first."""
    shortest = max(pack_seconds(batch), 1e-3 * batch.target)
    found = [_level(batch, num_stages, tau) for tau in np.geomspace(batch.target, min(shortest, batch.target), STEPS)]
    return sorted(set(found))[:LAID_OUT]


def _level(batch: Batch, num_stages: int, longest: float) -> Level:
    num_ranks = batch.cluster.num_ranks
    count = num_shared(batch.fewest, batch.local_seconds, longest)
    degrees, seconds = degrees_within(batch.cost, batch.lengths[:count], batch.fewest[:count], num_ranks, longest)
    by_time = np.argsort(-seconds, kind="stable")
    covered = np.minimum(np.cumsum(degrees[by_time]), num_ranks)
    paying = np.diff(covered, prepend=0)
    rest = num_ranks - int(paying.sum())
    bubbles = (num_stages - 1) * (float((paying * seconds[by_time]).sum()) + rest * pack_seconds(batch))
    work = float((degrees * seconds).sum() + batch.local_seconds[count:].sum())
    slowest = float(seconds.max(initial=0.0))
    return Level(end=max((work + bubbles) / num_ranks, num_stages * slowest), longest=max(slowest, longest))
