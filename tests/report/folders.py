"""Run folders for the tests of reports, made without training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from bytescale.config.load import config_to_toml
from bytescale.config.schema import Config, DataConfig, ParallelConfig, TrainerConfig
from bytescale.plan import Plan
from bytescale.plan.io import save_plan
from bytescale.plan.plan import GroupSpec
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


def write_run(
    path: Path,
    lines: list[dict[str, Any]],
    *,
    steps: int = 6,
    log: str = "",
    planner: str = "adaptive",
) -> Path:
    """Make a run folder with these lines of metrics, and a plan for each."""
    config = Config(
        data=DataConfig(sources=("corpus",), batch_tokens=8192),
        parallel=ParallelConfig(ranks=2),
        trainer=TrainerConfig(steps=steps, run_dir=str(path)),
    )
    config = replace(config, planner=replace(config.planner, name=planner))
    folder = RunFolder(path)
    folder.create(config, resume=False)
    assert folder.config.read_text() == config_to_toml(config)
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    folder.log.write_text(log, encoding="utf-8")
    for line in lines:
        save_plan(plan_of_two_ranks(), folder.plan(line["step"]))
    return path
