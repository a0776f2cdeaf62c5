"""The results of evaluations: a table on the console, and one line each in evaluations.jsonl."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytescale.common.units import format_count


@dataclass(frozen=True, kw_only=True)
class EvaluationMetrics:
    """One evaluation, over all ranks."""

    step: int
    num_targets: int
    """Labels with a weight other than 0."""
    loss: float
    """Weighted mean of the cross-entropies, in nats."""
    perplexity: float
    buckets: list[dict[str, Any]]
    """The same numbers of sequences of similar lengths, by length, where there are any. ``longest_tokens`` is the upper
    edge; None: sequences that are longer than all edges."""

    @staticmethod
    def of(step: int, edges: NDArray, totals: NDArray[np.float64]) -> EvaluationMetrics:
        """``totals [B, 3]``: sums of weighted losses, of absolute weights, and numbers of labels, by bucket."""
        named = zip([*map(int, edges), None], totals, strict=True)
        buckets = [{"longest_tokens": edge, **_figures(row)} for edge, row in named if row[2]]
        return EvaluationMetrics(step=step, **_figures(totals.sum(axis=0)), buckets=buckets)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def lines(self) -> list[str]:
        edges = [bucket["longest_tokens"] for bucket in self.buckets]
        names = ["longer" if edge is None else f"<= {format_count(edge)}" for edge in edges]
        shown = [f"{name}: {bucket['loss']:.4f}" for name, bucket in zip(names, self.buckets, strict=True)]
        first = f"eval    after step {self.step}: loss {self.loss:.4f}, perplexity {self.perplexity:.2f}, "
        return [f"{first}{format_count(self.num_targets)} targets", f"          by length: {', '.join(shown)}"]


def _figures(row: NDArray[np.float64]) -> dict[str, Any]:
    """Of a row of totals. The perplexity is infinite where it is no number of fp64."""
    loss = float(row[0] / row[1]) if row[1] else 0.0
    return {"num_targets": int(row[2]), "loss": loss, "perplexity": math.exp(loss) if loss < 709 else math.inf}
