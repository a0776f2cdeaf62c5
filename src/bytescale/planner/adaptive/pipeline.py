"""What a pipeline changes: the longest micro-batch of a rank costs p times its stage time, not once (``evaluate``).

So long sequences take more ranks than memory and balance require. A shorter stage time tau saves (p - 1) tau on every
rank that holds one of them, as long as compute hides the ring's messages. For a given tau the makespan is about

    T(tau) = ( sum of D t  +  local  +  (p - 1) * sum over R ranks of the longest t on each ) / R

Here every long sequence is on the fewest ranks that end it within tau. Long groups are stacked on long groups, so the
groups with the largest t cover every rank once, and each rank pays for one of them. A grid of values of tau is
estimated, and complete plans are made for the best few.

Shape letters: L sequences that have to be shared for a tau, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bytescale.planner.adaptive.target import degrees_within
from bytescale.planner.adaptive.trial import Batch, num_shared

MIN_PACK = 8192
"""Tokens; pack sizes are halved down to this size."""
STEPS = 24
"""Levels estimated, in geometric steps from the target down to the time of one micro-batch of short sequences."""
LAID_OUT = 5
"""How many of these levels are made into plans."""


class Level(NamedTuple):
    """A longest stage time (tau) and the estimated makespan with it (``end``), both in seconds."""

    end: float
    longest: float


def pack_sizes(capacity: int) -> list[int | None]:
    """Sizes of packs of whole sequences that are tried, in tokens: as many as fit (None), and repeated halves of it.

    Smaller packs fill and drain a pipeline in less time, at the cost of more launches. Packs below ``MIN_PACK`` tokens
    are not tried.
    """
    halvings = max(0, int(np.log2(max(capacity, 1) / MIN_PACK)))
    return [None, *(capacity >> halving for halving in range(1, halvings + 1))]


def pack_seconds(batch: Batch) -> float:
    """Mean time of a full micro-batch of whole sequences, in seconds, weighted by tokens."""
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
