"""The metrics of a step: one row on the console, one line of metrics.jsonl, and the trackers of the config."""

from __future__ import annotations

import json
import math
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bytescale.common.atomic import whole_file
from bytescale.common.errors import NonFiniteError
from bytescale.common.parsing import parse_json
from bytescale.train.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One step, over all ranks. Times in seconds."""

    step: int
    loss: float  # mean cross-entropy per token with a target, nats
    batch_loss: float  # load balance of experts, weighted; 0 for dense models
    grad_norm: float  # before clipping
    learning_rate: float
    num_tokens: int
    num_sequences: int
    step_seconds: float
    tokens_per_second: float
    model_flops_per_second: float  # of all ranks together; the model's own, sum of s_i^2 counted, nothing recomputed
    mfu: float | None  # model_flops_per_second over the peak of all ranks; None where the peak is not known
    memory_bytes: int  # largest of any rank: peak allocated on GPU, peak resident on CPU
    imbalance: float  # compute time of the slowest rank over the mean
    waiting_share: float  # of all ranks' time, spent waiting for other ranks
    waiting_seconds: float  # mean of ranks: for other ranks, inside forward and backward
    sync_seconds: float  # mean of ranks: from the last backward until gradients are reduced, slower ranks included
    data_wait_seconds: float  # slowest rank's wait for its loader
    planning_seconds: float  # of the slowest rank, or of the planner actor: off the critical path
    data_bytes_read: list[int]  # of the corpus, per rank; on the first rank alone
    data_bytes_received: list[int]  # likewise, from planner and servers; 0 under the local loader
    data_steps_ready: int  # steps that waited in the loader of the rank that had fewest
    data_restarts: int  # of servers and planner since the run was started or resumed
    predicted_seconds: float | None = None  # step_seconds as calibration foresaw it; None: nothing is calibrated
    attention_bytes_sent: int  # by all ranks together
    group_sizes: dict[str, int]  # degree -> slice groups ("1": ranks' local packs)

    def scalars(self) -> dict[str, float]:
        """The fields that are single numbers, by name, without the step's."""
        named = asdict(self).items()
        return {name: value for name, value in named if isinstance(value, int | float) and name != "step"}


class MetricsFile:
    """metrics.jsonl."""

    def __init__(self, run: RunFolder) -> None:
        self._file = run.metrics.open("a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        self._file.write(json.dumps(asdict(metrics)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def drop_metrics_after(path: Path, step: int) -> None:
    """Remove the lines of steps that a resumed run will repeat, so that each step is in the file once."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if _step_of(line) <= step]
    with whole_file(path) as temporary:
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


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


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._started


def _step_of(line: str) -> int:
    try:
        return int(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):  # the last line of a killed run may be cut off
        return 1 << 62
