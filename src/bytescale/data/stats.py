"""Statistics of how the tokens of a corpus are spread over document lengths. They show whether HDP will pay off."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.errors import DataError
from bytescale.common.units import format_count

BUCKET_EDGES: IntArray = 2 ** np.arange(9, 22, dtype=np.int64)
"""Upper edges of the buckets in tokens, 512 to 2M (2097152). One more bucket holds longer documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStats:
    """Documents and tokens per length bucket. Shape letter: B buckets, of which the last has no upper edge."""

    num_documents: IntArray  # [B]
    num_tokens: IntArray  # [B]
    longest_tokens: int
    median_tokens: int
    """Half of the documents are at most this long."""
    median_token_tokens: int
    """Half of the tokens sit in documents of at most this length."""

    @property
    def token_share(self) -> NDArray[np.float64]:
        """``[B]`` share of the tokens in each bucket. The shares sum to 1."""
        return self.num_tokens / self.num_tokens.sum()

    @property
    def document_share(self) -> NDArray[np.float64]:
        """``[B]`` share of the documents in each bucket. The shares sum to 1."""
        return self.num_documents / self.num_documents.sum()

    @property
    def labels(self) -> list[str]:
        """What each bucket holds, in words: ``"to 512"``, ``"to 1K"`` (above 512), ..., ``"above 2M"``."""
        names = [format_count(int(edge)) for edge in BUCKET_EDGES]
        return [*(f"to {name}" for name in names), f"above {names[-1]}"]


def length_stats(lengths: IntArray) -> LengthStats:
    """Compute the statistics of document lengths, int64 ``[D]`` tokens. Raises ``DataError`` if all are 0."""
    lengths = lengths[lengths > 0]
    if not len(lengths):
        raise DataError("there is no document with a token in it", fix="check the sources")
    bucket = np.searchsorted(BUCKET_EDGES, lengths, side="left")
    num_buckets = len(BUCKET_EDGES) + 1
    ordered = np.sort(lengths)
    tokens_up_to = np.cumsum(ordered)
    num_tokens = np.zeros(num_buckets, dtype=np.int64)
    np.add.at(num_tokens, bucket, lengths)  # not np.bincount, whose weights are floats and would round
    return LengthStats(
        num_documents=np.bincount(bucket, minlength=num_buckets).astype(np.int64),
        num_tokens=num_tokens,
        longest_tokens=int(ordered[-1]),
        median_tokens=int(ordered[(len(ordered) - 1) // 2]),
        median_token_tokens=int(ordered[np.searchsorted(tokens_up_to, -(-tokens_up_to[-1] // 2))]),
    )
