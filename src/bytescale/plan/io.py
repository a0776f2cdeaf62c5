"""Plans on disk: one ``.npz`` per step in the run folder, so that any step can be replayed, drawn and simulated."""

from __future__ import annotations

import io
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from bytescale.common.atomic import whole_file
from bytescale.common.errors import PlanError
from bytescale.common.parsing import read_input
from bytescale.common.units import MOST_COUNT
from bytescale.plan.plan import Plan

_SCALARS: dict[str, Any] = {"planner": str, "domain": int}
MOST_UNPACKED = 2**29
"""Bytes of a plan's arrays: those of 16,384 ranks and a million sequences have a tenth of it."""


def save_plan(plan: Plan, path: Path) -> None:
    """Write ``plan`` to ``path`` atomically: a killed process leaves the old file or none."""
    arrays: dict[str, Any] = {spec.name: np.asarray(getattr(plan, spec.name)) for spec in fields(plan)}
    with whole_file(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_plan(path: Path) -> Plan:
    """Read a plan that ``save_plan`` wrote. Raises ``PlanError`` when the file is not one."""
    try:
        packed = io.BytesIO(read_input(path))
        if sum(entry.file_size for entry in zipfile.ZipFile(packed).infolist()) > MOST_UNPACKED:
            raise ValueError(f"it would unpack to more than {MOST_UNPACKED >> 20} MiB")
        with np.load(packed, allow_pickle=False) as stored:
            values = {spec.name: stored[spec.name] for spec in fields(Plan)}
        for name in values.keys() - _SCALARS.keys():
            if (value := values[name]).ndim != 1 or value.dtype.kind not in "iuf":
                raise ValueError(f"{name} is no list of numbers")
            if not (np.abs(value.astype(np.float64)) <= MOST_COUNT).all():
                raise ValueError(f"{name} has a number beyond {MOST_COUNT}")
        scalars = {name: kind(values[name].item()) for name, kind in _SCALARS.items()}
    except (OSError, EOFError, KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise PlanError(f"{path} is not a plan ({error})", fix="name a .npz file from a run folder's plans/") from error
    return Plan(**values | scalars)
