"""The results of evaluations: a table on the console, and one line each in evaluations.jsonl."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from bytescale.common.units import format_count


@dataclass(frozen=True, kw_only=True)
class LengthBucket:
    """The sequences of similar lengths."""

    longest_tokens: int | None
    """Upper edge in tokens; None: sequences that are longer than all edges."""
    num_targets: int
    """Labels with a weight other than 0."""
    loss: float
    """Weighted mean of the cross-entropies, in nats."""
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class EvaluationMetrics:
    """One evaluation, over all ranks."""

    step: int
    num_targets: int
    loss: float
    perplexity: float
    buckets: list[LengthBucket]
    """Those that hold anything, by length."""

    @staticmethod
    def of(step: int, edges: NDArray, totals: NDArray[np.float64]) -> EvaluationMetrics:
        """``totals [B, 3]``: sums of weighted losses, of absolute weights, and numbers of labels, by bucket."""
        named = [*map(int, edges), None]
        buckets = [
            LengthBucket(
                longest_tokens=edge, num_targets=int(row[2]), loss=_mean(row), perplexity=perplexity(_mean(row))
            )
            for edge, row in zip(named, totals, strict=True)
            if row[2]
        ]
        whole = totals.sum(axis=0)
        loss = _mean(whole)
        return EvaluationMetrics(
            step=step, num_targets=int(whole[2]), loss=loss, perplexity=perplexity(loss), buckets=buckets
        )

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    def lines(self) -> list[str]:
        """For people."""
        shown = [
            f"{'longer' if bucket.longest_tokens is None else '<= ' + format_count(bucket.longest_tokens)}: "
            f"{bucket.loss:.4f}"
            for bucket in self.buckets
        ]
        first = f"eval    after step {self.step}: loss {self.loss:.4f}, perplexity {self.perplexity:.2f}, "
        return [f"{first}{format_count(self.num_targets)} targets", f"          by length: {', '.join(shown)}"]


def perplexity(loss: float) -> float:
    """``exp(loss)``; infinity where that is no number of fp64."""
    return math.exp(loss) if loss < 709 else math.inf


def _mean(row: NDArray[np.float64]) -> float:
    return float(row[0] / row[1]) if row[1] else 0.0
