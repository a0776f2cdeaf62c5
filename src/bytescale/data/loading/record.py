"""A run's record of its data: the token ranges that every rank was given in every step.

Each attempt at a run (the first start, and every restart) has a folder, in which each rank writes a file of JSON lines.
Of a step that was repeated after a restart, the last attempt trained the weights.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.data.loading.loader import StepData


def recorder(folder: Path | None, rank: int, about: dict[str, int]) -> Callable[[StepData], None] | None:
    """Return a function that writes down the token ranges of a step: ``Feed.record`` of HDP rank ``rank``.

    Args:
        folder: of this attempt, the same on all ranks; None where another process of the same HDP rank records.
        rank: HDP rank of this process.
        about: what stands in every line: ``num_ranks`` and ``batch_tokens``, which a resumed run may change.
    """
    if folder is None:
        return None
    path = folder / f"rank-{rank:05d}.jsonl"

    def write(data: StepData) -> None:
        line = {"step": data.step, **about, "segments": segments_of(data).tolist()}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    return write


def segments_of(data: StepData) -> IntArray:
    """Return one row for each segment that has tokens, int64 ``[N, 4]``.

    The columns are the name of the sample, the first token, one past the last token, and the checksum of the tokens.
    """
    rows = []
    for wanted, given in zip(data.rank_plan.micro_batches, data.micro_batches, strict=True):
        ends = np.cumsum(wanted.segment_stops - wanted.segment_starts)
        columns = (given.segment_samples, wanted.segment_starts, wanted.segment_stops, ends)
        for sample, start, stop, end in zip(*(column.tolist() for column in columns), strict=True):
            if stop > start:
                rows.append((sample, start, stop, checksum_of_tokens(given.tokens[end - (stop - start) : end])))
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def new_attempt_folder(folder: Path) -> Path:
    """Make the folder of the next attempt below ``folder``."""
    number = max((number_of(path) for path in folder.glob("attempt-*")), default=0) + 1
    path = folder / f"attempt-{number:04d}"
    path.mkdir(parents=True)
    return path


def checksum_of_tokens(tokens: NDArray[np.integer]) -> int:
    return zlib.crc32(np.ascontiguousarray(tokens, dtype="<i8").data)


def number_of(path: Path) -> int:
    found = re.search(r"-(\d+)", path.name)
    assert found, f"{path} is numbered"
    return int(found[1])
