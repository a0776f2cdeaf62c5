"""Numbers per token beside the tokens of a pair: weights of the loss, labels, and whatever else a corpus has.

Field ``weights`` of ``PREFIX.bin/.idx`` is a second pair ``PREFIX.weights.bin/.idx`` of the same format: fp32 numbers
(or another numeric type that another program wrote), cut into the same documents. Field ``labels`` holds int32 ids:
what is to be predicted at the place of each token. A pair has it only where that differs from the token itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.errors import DataError
from bytescale.common.labels import OWN_FIELDS

WEIGHTS, LABELS = OWN_FIELDS
_EXPANDED_TOKENS = 1 << 24


def field_dtype(name: str) -> np.dtype:
    """Return the type in which the numbers of a field are kept."""
    return np.dtype("<i4") if name == LABELS else np.dtype("<f4")


def without_field(name: str, tokens: NDArray) -> NDArray:
    """``[T]`` what field ``name`` of ``OWN_FIELDS`` is for ``tokens [T]`` that do not have it: weight 1, own label."""
    assert name in OWN_FIELDS, f"{name} has no default"
    return tokens.astype(field_dtype(name)) if name == LABELS else np.ones(len(tokens), field_dtype(name))


def field_prefix(prefix: Path, name: str) -> Path:
    """Return the path, without its endings, of the pair that holds field ``name`` of the pair ``prefix``."""
    return prefix.with_name(f"{prefix.name}.{name}")


@dataclass(frozen=True, slots=True)
class WeightRuns:
    """The weights of a part of the corpus as runs of equal ones: conversations have a few runs each. R: runs."""

    starts: IntArray  # [R + 1] first token of each run in the part, then the number of all tokens
    values: NDArray[np.float32]  # [R]

    @staticmethod
    def of(weights: NDArray, place: str) -> WeightRuns:
        """Find the runs of ``weights [T]``. Raises ``DataError`` if one of them is not finite in fp32."""
        values = np.asarray(weights).astype(np.float32)
        if not np.isfinite(values).all():
            token = int(np.flatnonzero(~np.isfinite(values))[0])
            raise DataError(
                f"{place}: the weight of token {token} is {values[token]}",
                so="the loss would not be a number",
                fix="write finite weights",
            )
        changes = np.flatnonzero(values[1:] != values[:-1]) + 1
        first = [0] if len(values) else []
        starts = np.concatenate([first, changes, [len(values)]]).astype(np.int64)
        return WeightRuns(starts, values[starts[:-1]])

    def sums(self, firsts: IntArray, stops: IntArray) -> tuple[IntArray, NDArray[np.float64]]:
        """``[P]`` numbers of weights that are not 0 in the ranges ``firsts[i]`` to ``stops[i] - 1``, and ``[P]`` sums.

        The sums are of absolute values. They depend on the weights of their range alone, to the last bit. The ranges
        rise and do not overlap.
        """
        counts, totals = np.zeros(len(firsts), dtype=np.int64), np.zeros(len(firsts))
        begin = 0
        while begin < len(firsts):  # some ranges at a time: their weights exist one by one
            end = max(begin + 1, int(np.searchsorted(stops, firsts[begin] + _EXPANDED_TOKENS, side="right")))
            low, high = int(firsts[begin]), int(stops[end - 1])
            weights = self._expanded(low, high)
            for place, (first, stop) in enumerate(
                zip((firsts[begin:end] - low).tolist(), (stops[begin:end] - low).tolist(), strict=True), begin
            ):
                counts[place] = np.count_nonzero(weights[first:stop])
                totals[place] = weights[first:stop].sum()
            begin = end
        return counts, totals

    def _expanded(self, low: int, high: int) -> NDArray[np.float64]:
        """``[high - low]`` absolute weights of a range of tokens."""
        first = int(np.searchsorted(self.starts, low, side="right")) - 1
        last = max(first + 1, int(np.searchsorted(self.starts, high, side="left")))
        edges = np.clip(self.starts[first : last + 1], low, max(low, high))
        return np.repeat(np.abs(self.values[first:last]).astype(np.float64), np.diff(edges))
