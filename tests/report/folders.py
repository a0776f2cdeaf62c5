"""Run folders for the tests of reports, made without training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from bytescale.config import Config, DataConfig, LogConfig, ParallelConfig, TrainerConfig, config_to_toml
from bytescale.plan import Plan
from bytescale.plan.io import save_plan
from bytescale.plan.plan import GroupSpec
from bytescale.simulator.step_trace import StepTrace, TraceMetadata, save_step_trace
from bytescale.simulator.trace import Span, Track
from bytescale.train.run_folder import RunFolder


def metrics_line(step: int, **changes: Any) -> dict[str, Any]:
    """A step of 2 s on 2 ranks: 1.5 s compute, 0.3 s waiting, 0.1 s reducing."""
    line = {
        "step": step,
        "loss": 9.0 - 0.5 * step,
        "step_seconds": 2.0,
        "num_tokens": 8192,
        "tokens_per_second": 4096.0,
        "model_flops_per_second": 1e11,
        "mfu": None,
        "memory_bytes": 3 * 2**28,
        "imbalance": 1.01,
        "waiting_share": 0.25,
        "waiting_seconds": 0.3,
        "sync_seconds": 0.1,
        "data_wait_seconds": 0.0,
        "planning_seconds": 0.01,
        "data_bytes_read": [10, 12],
        "attention_bytes_sent": 2**20,
        "group_sizes": {"2": 1},
    }
    return {**line, **changes}


def plan_of_two_ranks() -> Plan:
    """Sequence 0 of 3000 tokens over both ranks, sequences 1 and 2 of 100 and 1000 tokens on one rank each."""
    groups = [GroupSpec(sequences=seqs, ranks=ranks) for seqs, ranks in (([0], [0, 1]), ([1], [0]), ([2], [1]))]
    return Plan.build(
        lengths=[3000, 100, 1000], capacity_tokens=[2000] * 2, groups=groups, schedule=[[[0], [1]], [[0], [2]]]
    )


def trace_of_two_ranks(step: int, *, slowness: float = 1.0) -> StepTrace:
    """Rank 1 takes ``slowness`` times as long as rank 0 for what was predicted to be equal."""

    def track(rank: int, factor: float) -> Track:
        forward, backward = factor, 2 * factor
        end = forward + backward
        spans = [
            Span(name="wait: data", category="data", start=-0.3, seconds=0.2),
            Span(name="agree", category="agree", start=-0.1, seconds=0.1),
            Span(name="forward, shared by 2", category="forward", start=0.0, seconds=forward, about={"tokens": 1500}),
            Span(name="wait: ring", category="wait", start=0.1, seconds=0.25),
            Span(name="backward, shared by 2", category="backward", start=forward, seconds=backward),
            Span(name="reduction", category="reduction", start=end, seconds=0.5),
            Span(name="wait: gradients, parameters", category="wait", start=end + 0.1, seconds=0.4),
            Span(name="update", category="update", start=end + 0.5, seconds=0.1),
        ]
        return Track(rank=rank, name="stage 0", spans=spans, kind="measured")

    def predicted(rank: int) -> Track:
        forward = Span(name="forward, shared by 2", category="forward", start=0.0, seconds=0.5)
        backward = Span(name="backward, shared by 2", category="backward", start=0.5, seconds=1.0)
        return Track(rank=rank, name="stage 0", spans=[forward, backward], kind="predicted")

    metadata = TraceMetadata(step=step, measured_seconds=3.9, predicted_seconds=1.5, prediction="flops", num_ranks=2)
    return StepTrace(metadata=metadata, tracks=[track(0, 1.0), track(1, slowness), predicted(0), predicted(1)])


def write_run(
    path: Path,
    lines: list[dict[str, Any]],
    *,
    steps: int = 6,
    log: str = "",
    traced: StepTrace | None = None,
    planner: str = "adaptive",
    trace_steps: tuple[int, ...] = (),
) -> Path:
    """Make a run folder with these lines of metrics, and a plan for each."""
    config = Config(
        data=DataConfig(sources=("corpus",), batch_tokens=8192),
        parallel=ParallelConfig(ranks=2),
        trainer=TrainerConfig(steps=steps, run_dir=str(path)),
        log=LogConfig(trace_steps=trace_steps),
    )
    config = replace(config, planner=replace(config.planner, name=planner))
    folder = RunFolder(path)
    folder.create(config, resume=False)
    assert folder.config.read_text() == config_to_toml(config)
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    folder.log.write_text(log, encoding="utf-8")
    for line in lines:
        save_plan(plan_of_two_ranks(), folder.plan(line["step"]))
    if traced is not None:
        folder.traces.mkdir()
        save_step_trace(traced, folder.trace(traced.metadata.step))
    return path
