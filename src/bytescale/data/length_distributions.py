"""Length distributions of the paper's two data sets (section 3.1), to plan, simulate and measure without the data.

The paper does not print its shares. These are chosen so that they satisfy what it says about the two data sets. Of the
tokens of github, 16.2 % are in documents above 128K and 9.8 % above 256K. Of byted's, 44.3 % are above 128K, 37 % above
256K and 12.1 % at 2M, and about 80 % of its documents have up to 4K.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.errors import ConfigError

_TOKEN_SHARES = {
    "byted": (0.102, 0.076, 0.076, 0.076, 0.076, 0.076, 0.075, 0.073, 0.107, 0.142, 0.121),
    "github": (0.226, 0.114, 0.114, 0.104, 0.095, 0.088, 0.097, 0.064, 0.045, 0.033, 0.020),
}
"""Share of the tokens in each bucket. In the last one, every document has exactly 2M tokens, the longest context."""


def distribution_names() -> tuple[str, ...]:
    """``("byted", "github")``."""
    return tuple(_TOKEN_SHARES)


def bucket_edges() -> IntArray:
    """``[B + 1]`` tokens: bucket i holds lengths in (edge i, edge i + 1]. The edges are 512, 2K, 4K, 8K, ... 2M."""
    return 2 ** np.array([9, *range(11, 22)], dtype=np.int64)


def token_shares(name: str) -> NDArray[np.float64]:
    """``[B]`` share of tokens per bucket. The shares sum to 1. Raises ``ConfigError`` for an unknown name."""
    if name not in distribution_names():
        raise ConfigError(
            f"there is no length distribution {name!r}", fix="use one of " + ", ".join(distribution_names())
        )
    shares = np.array(_TOKEN_SHARES[name])
    return shares / shares.sum()


def sample_lengths(
    name: str, num_tokens: int, seed: int, max_length: int | None = None, *, lowest_edge: int | None = None
) -> IntArray:
    """Draw the lengths of documents that have about ``num_tokens`` tokens together, in random order.

    1. Each bucket gets its share of ``num_tokens``. A fraction of a document becomes a whole one with that probability,
       so the expected share is exact.
    2. Lengths are log-uniform inside a bucket. In the last bucket all lengths are exactly the upper edge.
    3. Documents above ``max_length`` are split, as ``over_length = "split"`` does.

    Args:
        num_tokens: expected sum of the lengths.
        max_length: context length in tokens; None: the upper edge of the last bucket (2M).
        lowest_edge: lower edge of the first bucket in tokens; None: the stored one (512).

    Returns int64 lengths, one per sequence, each at least 1.
    Raises ``ConfigError`` for an unknown name, or a number below 1.
    """
    shares, edges = token_shares(name), bucket_edges().astype(np.float64)
    if num_tokens < 1 or (max_length is not None and max_length < 1):
        raise ConfigError(
            f"num_tokens = {num_tokens}, max_length = {max_length}", fix="use whole numbers of at least 1"
        )
    if lowest_edge is not None:
        if not 1 <= lowest_edge < edges[1]:
            raise ConfigError(f"lowest_edge = {lowest_edge}", fix=f"use 1 to {int(edges[1]) - 1} tokens")
        edges[0] = lowest_edge
    low, high = edges[:-1], edges[1:]
    means = (high - low) / np.log(high / low)  # of a log-uniform variable
    low, means = low.copy(), means.copy()
    low[-1] = means[-1] = high[-1]
    generator = np.random.default_rng(seed)
    counts = np.floor(shares * num_tokens / means + generator.random(len(shares))).astype(np.int64)
    bucket = np.repeat(np.arange(len(counts)), counts)
    exponent = generator.random(len(bucket))
    lengths = np.ceil(low[bucket] * (high[bucket] / low[bucket]) ** exponent).astype(np.int64)
    lengths = np.minimum(lengths, edges[1:].astype(np.int64)[bucket])  # np.ceil may round up past the edge
    if max_length is not None:
        whole, rest = np.divmod(lengths, max_length)
        lengths = np.concatenate([np.full(int(whole.sum()), max_length, dtype=np.int64), rest[rest > 0]])
    return generator.permutation(lengths)
