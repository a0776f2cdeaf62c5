"""Reads what a run has left in its folder, whether it has finished, still goes on, or was killed."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.common.errors import BytescaleError, ConfigError
from bytescale.common.parsing import MOST_SETTINGS, parse_json, parse_toml, read_input, read_text
from bytescale.config.schema import Config
from bytescale.plan.io import load_plan
from bytescale.simulator.trace import spread_evenly
from bytescale.train.run_folder import RunFolder, is_locked

MAX_LINES = 20_000
"""Most lines that are read of a file with a line a step; of longer ones, every so many-th and the last."""
MOST_RECORD = 2**29
"""Bytes of such a file."""
_MOST_NOTES = 5
MAX_PLANS = 200
"""Most plans that are read for lengths and degrees; they are spread evenly over the steps."""
NEEDED = ("loss", "step_seconds", "num_tokens", "waiting_share", "waiting_seconds", "sync_seconds", "data_wait_seconds")
"""The numbers without which a line of metrics.jsonl is not the line of a step."""
_ROW = re.compile(r"\d+/\d+ ")  # the row of a step in log.txt


class Batches(NamedTuple):
    """The sequences of the plans that were read. Letters: S sequences, G slice groups."""

    num_plans: int
    lengths: IntArray  # [S] tokens
    degrees: IntArray  # [S] ranks that share the sequence's slice group; 1: the sequence is whole on one rank
    group_degrees: IntArray  # [G]
    group_tokens: IntArray  # [G]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run. ``steps``, ``evaluations`` and ``calibration`` have the lines of their files in the order of steps."""

    name: str
    """The folder's name, made unique among the runs of the report."""
    settings: dict[str, Any]
    """ "section.key" -> value: what the newest config of the run says, and the defaults for all else."""
    steps: list[dict[str, Any]]
    state: str
    """One of finished, running, stopped, failed, killed, empty."""
    state_text: str
    """The state in a sentence."""
    notes: list[str]
    """What could not be read, in sentences."""
    log: list[str]
    evaluations: list[dict[str, Any]]
    calibration: list[dict[str, Any]]
    batches: Batches | None

    def column(self, name: str) -> list[float | None]:
        """One number per step; None where a line has no such number."""
        values = (line.get(name) for line in self.steps)
        return [float(value) if isinstance(value, int | float) else None for value in values]

    @property
    def step_numbers(self) -> list[int]:
        return [int(line["step"]) for line in self.steps]


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read runs. Raises ``ConfigError`` that names every path that is not the folder of a run."""
    missing = [str(path) for path in paths if not RunFolder(path).config.is_file()]
    if missing or not paths:
        raise ConfigError(
            f"{', '.join(missing)}: not the folder of a run (there is no config.toml inside)"
            if paths
            else "no run is named",
            so="there is nothing to report",
            fix="name folders that `bytescale train` has written, such as runs/NAME",
        )
    resolved = [path.resolve() for path in paths]
    names = [path.name for path in resolved]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.name}" for path in resolved]
    names = [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, start=1)]
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def read_run(path: Path, name: str) -> RunRecord:
    """Read one run folder. What is damaged is left out and named in ``notes``."""
    folder = RunFolder(path)
    notes: list[str] = []
    settings = _settings(folder, notes)
    steps = _lines(folder.metrics, NEEDED, notes)
    log = _content(folder.log, notes).decode(errors="replace").splitlines()
    state, state_text = _state(folder, int(settings["trainer.steps"]), steps, log)
    return RunRecord(
        name=name,
        settings=settings,
        steps=steps,
        state=state,
        state_text=state_text,
        notes=notes,
        log=log,
        evaluations=[line for line in _lines(folder.evaluations, ("loss",), notes) if _has_buckets(line)],
        calibration=[line for line in _lines(folder.calibration, (), notes) if _are_numbers(line.get("speeds"))],
        batches=_batches(folder, [int(line["step"]) for line in steps], notes),
    )


def _settings(folder: RunFolder, notes: list[str]) -> dict[str, Any]:
    """The defaults, then the newest config. Unknown keys of other versions of bytescale are kept."""
    path = max(folder.path.glob("config-resumed-*.toml"), default=folder.config)
    sections = {spec.name: getattr(Config(), spec.name) for spec in fields(Config)}
    settings = {f"{name}.{key.name}": getattr(one, key.name) for name, one in sections.items() for key in fields(one)}
    try:
        content = parse_toml(read_text(path, MOST_SETTINGS))
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read ({error}); settings are shown at their defaults.")
        return settings
    sections = {name: values for name, values in content.items() if isinstance(values, dict)}
    given = {f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()}
    for name in [name for name, value in given.items() if type(settings.get(name)) in (int, str)]:
        if type(given[name]) is not type(settings[name]):
            notes.append(f"{path.name} has {name} = {given.pop(name)!r}; it is shown at its default.")
    return settings | given


def _lines(path: Path, needed: Sequence[str], notes: list[str]) -> list[dict[str, Any]]:
    """The lines of a file with one JSON object a step, by step. ``needed``: numbers without which a line is damaged."""
    content = _content(path, notes)
    number = content.count(b"\n") + (not content.endswith(b"\n"))
    every = -(-number // MAX_LINES)
    if every > 1:
        notes.append(f"{path.name} has {number} lines; one in {every} is read.")
    steps, damaged = dict[int, dict[str, Any]](), list[int]()
    for place, line in enumerate(io.BytesIO(content), start=1):
        if not line.strip() or (place % every and place < number):
            continue
        try:
            row = parse_json(line)
            if not all(math.isfinite(float(row[name])) for name in needed) or not dict(row).get("step_seconds", 1) > 0:
                raise ValueError("no step has such numbers")
            steps[int(row["step"])] = row
        except (ValueError, KeyError, TypeError, OverflowError):
            damaged.append(place)
    if damaged and damaged[-1] == number:
        damaged.pop()
        notes.append(f"The last line of {path.name} is cut off, as when a run is killed; it is left out.")
    notes += [f"Line {place} of {path.name} is damaged; it is left out." for place in damaged[:_MOST_NOTES]]
    if more := damaged[_MOST_NOTES:]:
        notes.append(f"{len(more)} more lines of {path.name} are damaged; they are left out.")
    return [steps[step] for step in sorted(steps)]


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, int | float) for value in values)


def _has_buckets(line: dict[str, Any]) -> bool:
    names, buckets = ("loss", "perplexity", "num_targets"), line.get("buckets", [])
    return isinstance(buckets, list) and all(
        isinstance(one, dict)
        and "longest_tokens" in one
        and _are_numbers([one.get(name) for name in names] + [one["longest_tokens"] or 0])
        for one in buckets
    )


def _content(path: Path, notes: list[str]) -> bytes:
    try:
        return read_input(path, MOST_RECORD)
    except FileNotFoundError:
        return b""
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror}); it is left out.")
        return b""


def _state(folder: RunFolder, total: int, steps: list[dict[str, Any]], log: list[str]) -> tuple[str, str]:
    done = int(steps[-1]["step"]) if steps else 0
    where = f"step {done} of {total}" if steps else "its first step"
    if is_locked(folder.path):
        return "running", f"This run is still running: it has done {where}. The report shows what there is so far."
    if done >= total:
        return "finished", f"This run has finished its {total} steps."
    last = _last_words(log)
    if last.startswith(("stopped by a signal", "stopped by SIGTERM")):
        return "stopped", f"This run was stopped after {where}. `bytescale train --resume {folder.path}` continues it."
    if last:
        return "failed", f"This run failed after {where}: {last.removeprefix('stopped by ')}"
    if not steps:
        return "empty", "This run has not finished its first step, and no process is working on it."
    return "killed", (
        f"This run was killed after {where}: it is not running, and its log ends without a word. "
        f"`bytescale train --resume {folder.path}` continues it."
    )


def _last_words(log: list[str]) -> str:
    """The line in which the run says why it stopped; empty if it went on afterwards or said nothing."""
    for line in reversed(log):
        if line.startswith("stopped by "):
            return line
        if _ROW.match(line) or line.startswith("resuming after"):
            return ""
    return ""


def _batches(folder: RunFolder, steps: list[int], notes: list[str]) -> Batches | None:
    """The sequences of up to ``MAX_PLANS`` steps. None if no plan was saved."""
    there = [path for path in map(folder.plan, steps) if path.exists()]
    plans = []
    for place in spread_evenly(len(there), MAX_PLANS) if there else ():
        try:
            plans.append(load_plan(there[place]))
        except BytescaleError as error:
            notes.append(str(error))
    if not plans:
        return None
    degrees = [np.repeat(plan.group_sizes, np.diff(plan.group_sequence_offsets)) for plan in plans]
    return Batches(
        num_plans=len(plans),
        lengths=np.concatenate([plan.lengths[plan.group_sequences] for plan in plans]),
        degrees=np.concatenate(degrees),
        group_degrees=np.concatenate([plan.group_sizes for plan in plans]),
        group_tokens=np.concatenate([plan.group_tokens for plan in plans]),
    )
