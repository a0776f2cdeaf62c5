"""Writes a simulated step as Chrome trace JSON, to be opened in https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bytescale.simulator.result import SimulatedStep

MICRO = 1e6  # the format counts in microseconds


def save_trace(step: SimulatedStep, path: Path, *, max_ranks: int = 64) -> None:
    """Write the tasks and the gradient sync of up to ``max_ranks`` ranks, spread evenly over all ranks.

    The trace has one process per rank and one thread per stage. The name of a task says how many ranks share its
    micro-batch and, if stages are interleaved, which chunk runs.
    """
    ranks = np.unique(np.linspace(0, step.events.num_ranks - 1, min(max_ranks, step.events.num_ranks)).astype(int))
    content = {"traceEvents": trace_events(step, ranks.tolist()), "displayTimeUnit": "ms"}
    path.write_text(json.dumps(content), encoding="utf-8")


def trace_events(step: SimulatedStep, ranks: list[int]) -> list[dict[str, Any]]:
    """Return the entries of ``ranks``, as dictionaries in Chrome's trace event format."""
    events, timeline = step.events, step.timeline
    num_stages, num_parts = step.num_stages, timeline.start.shape[1]
    entries: list[dict[str, Any]] = []
    for rank in ranks:
        entries.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        micro_batches = np.flatnonzero(events.micro_batch_ranks == rank)
        for stage in range(num_stages):
            entries.append(
                {"name": "thread_name", "ph": "M", "pid": rank, "tid": stage, "args": {"name": f"stage {stage}"}}
            )
            for part in range(stage, num_parts, num_stages):
                for micro_batch in micro_batches.tolist():
                    entries += _tasks(step, micro_batch, rank, part)
            sync = float(step.sync_seconds[rank, stage])
            if sync > 0:
                start = float(timeline.end[:, stage::num_stages].max())
                entries.append(_slice("gradient sync", "sync", rank, stage, start, sync, {}))
    return entries


def _tasks(step: SimulatedStep, micro_batch: int, rank: int, part: int) -> list[dict[str, Any]]:
    loads, timeline = step.events.loads, step.timeline
    event = int(step.events.micro_batch_events[micro_batch])
    degree = int(loads.degree[micro_batch])
    chunk, stage = divmod(part, step.num_stages)
    what = f"shared by {degree}" if degree > 1 else "local"
    if timeline.start.shape[1] > step.num_stages:
        what += f", chunk {chunk}"
    about = {
        "tokens": int(loads.tokens[micro_batch]),
        "shared tokens of the group": int(loads.shared_tokens[micro_batch]),
        "offload ratio": round(float(loads.offload_ratio[micro_batch]), 3),
    }
    entries = []
    for direction, word in enumerate(("forward", "backward")):
        start, end = (float(times[event, part, direction]) for times in (timeline.start, timeline.end))
        entries.append(_slice(f"{word}, {what}", word, rank, stage, start, end - start, about))
    return entries


def _slice(
    name: str, category: str, rank: int, stage: int, start: float, seconds: float, about: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": rank,
        "tid": stage,
        "ts": start * MICRO,
        "dur": seconds * MICRO,
        "args": about,
    }
