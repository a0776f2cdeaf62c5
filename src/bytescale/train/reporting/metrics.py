"""The metrics of a step and of an evaluation, and what ranks share: sums before an update, times behind it."""

from __future__ import annotations

import json
import math
import resource
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from bytescale.common.errors import NonFiniteError
from bytescale.common.units import format_count
from bytescale.runtime.group import RankGroup

_SUM, _MEAN, _MAX, _MIN, _LIST = ({"over": how} for how in ("sum", "mean", "max", "min", "list"))
"""How the figures of all ranks become one: sums and extremes go to all ranks, lists to the first rank alone.

At 16,384 ranks a table of everybody's numbers takes longer to read than to send. So sums and maxima are made on the way
(two all-reduces of some numbers), and what metrics.jsonl lists rank by rank goes to the rank that writes it."""


class OfARank:
    """Figures of one rank, or of all ranks together (``of_all``)."""

    def of_all(self, world: RankGroup) -> Self:
        """Those of all ranks together; called by every rank. Sums and extremes have the same bits on all of them."""
        known = fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
        sums, means, maxima, minima, lists = (
            {spec.name: getattr(self, spec.name) for spec in known if spec.metadata["over"] == how}
            for how in ("sum", "mean", "max", "min", "list")
        )
        added = world.sum_of([float(number) for number in (*sums.values(), *means.values())])
        extremes = [float(number) for number in (*maxima.values(), *(-one for one in minima.values()))]
        most = world.max_of(extremes) if extremes else []
        rows = world.gather_on_first([float(one[0]) for one in lists.values()]) if lists else []
        found: dict[str, Any] = dict(zip((*sums, *means, *maxima, *minima), (*added, *most), strict=True))
        found |= {name: found[name] / world.size for name in means} | {name: -found[name] for name in minima}
        found |= {spec.name: int(found[spec.name]) for spec in known if spec.type == "int"}
        found |= {name: [int(row[place]) for row in rows] for place, name in enumerate(lists)}
        return type(self)(**found)


@dataclass(frozen=True, kw_only=True)
class StepSums(OfARank):
    """What the update needs of a step. No clock is read for it: that would let a GPU wait for its host."""

    loss_sum: float = field(metadata=_SUM)
    num_targets: float = field(metadata=_SUM)
    batch_loss: float = field(
        metadata=_SUM
    )  # of experts' balance or of indexers, weighted, told by one rank of a stage
    norm_share: float = field(metadata=_SUM)  # sum of squares of the rank's part of the gradient
    stop_heard: float = field(metadata=_SUM)  # 1: the rank was asked to stop
    ranks_waiting: float = field(metadata=_SUM)  # new ones, as the first rank sees it

    @property
    def grad_norm(self) -> float:
        """Norm of the whole gradient."""
        return self.norm_share**0.5


@dataclass(frozen=True, kw_only=True)
class SharedFigures:
    """What a rank tells the others of a step, and metrics.jsonl of all of them."""

    memory_bytes: int = field(metadata=_MAX)  # peak allocated on GPU, peak resident on CPU
    waiting_seconds: float = field(metadata=_MEAN)  # for other ranks, inside forward and backward
    sync_seconds: float = field(metadata=_MEAN)  # from the last backward until gradients are reduced, with all waits
    encode_seconds: float = field(default=0.0, metadata=_MEAN)  # of encoders, before and behind the text
    attention_bytes_sent: int = field(metadata=_SUM)
    data_wait_seconds: float = field(metadata=_MAX)  # for the loader
    planning_seconds: float = field(metadata=_MAX)  # off the critical path
    data_bytes_read: list[int] = field(metadata=_LIST)  # of the corpus; of all ranks in their order on the first one
    data_steps_ready: int = field(metadata=_MIN)  # steps that waited in the loader
    data_restarts: int = field(metadata=_MAX)  # of servers since the run was started or resumed


@dataclass(frozen=True, kw_only=True)
class RankFigures(OfARank, SharedFigures):
    """The times of a step, of one rank or of all ranks together."""

    busy_seconds: float = field(metadata=_MEAN)  # in forward and backward, without waiting for other ranks
    most_busy_seconds: float = field(metadata=_MAX)  # the same


@dataclass(frozen=True, kw_only=True)
class StepMetrics(SharedFigures):
    """One step, over all ranks. Times in seconds."""

    step: int
    loss: float  # mean cross-entropy per token with a target, nats
    batch_loss: float  # of experts' balance or of indexers, weighted
    grad_norm: float  # before clipping
    learning_rate: float
    num_tokens: int
    num_sequences: int
    step_seconds: float
    tokens_per_second: float
    model_flops_per_second: float  # of all ranks together; the model's own, sum of s_i^2 counted, nothing recomputed
    mfu: float | None  # model_flops_per_second over the peak of all ranks; None where the peak is not known
    imbalance: float  # compute time of the slowest rank over the mean
    waiting_share: float  # of all ranks' time, spent waiting for other ranks
    predicted_seconds: float | None = None  # step_seconds as calibration foresaw it; None: nothing is calibrated
    static_seconds: float | None = None  # the same on a static mesh for the whole context (``log.static_mesh``)
    group_sizes: dict[str, int]  # degree -> slice groups ("1": ranks' local packs)

    def to_json(self) -> str:
        return json.dumps({"step": self.step, "loss": self.loss} | asdict(self)) + "\n"

    def scalars(self) -> dict[str, float]:
        """The fields that are single numbers, by name, without the step's."""
        named = asdict(self).items()
        return {name: value for name, value in named if isinstance(value, int | float) and name != "step"}


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


def memory_bytes(device: torch.device) -> int:
    """Peak memory of this rank: allocated by tensors on a GPU, resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check_finite(step: int, loss: float, grad_norm: float, checkpoint: Path | None) -> None:
    """Raise ``NonFiniteError`` before a NaN reaches the weights."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    where = f"the last checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
    raise NonFiniteError(
        f"step {step}: loss is {loss}, gradient norm {grad_norm}",
        so=f"the update would destroy the weights, so it was not made; {where}",
        fix="lower optimizer.lr, lengthen optimizer.warmup_steps or set optimizer.clip_grad_norm, then resume",
    )
