"""A run's record of its data: the token ranges that every rank was given in every step, and a check of the record.

Each attempt at a run (the first start, and every restart) has a folder, in which each rank writes a file of JSON lines.
Of a step that was repeated after a restart, the last attempt trained the weights.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray
from bytescale.common.errors import DataError
from bytescale.common.parsing import parse_json, read_text
from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import Corpus
from bytescale.data.loading.loader import StepData
from bytescale.data.order.batches import BatchSampler

_NO_SEGMENTS = np.zeros((0, 4), dtype=np.int64)


def recorder(folder: Path | None, rank: int, about: dict[str, int]) -> Callable[[StepData], None] | None:
    """Return a function that writes down the token ranges of a step: ``Loader.record`` of HDP rank ``rank``.

    Args:
        folder: of this attempt, the same on all ranks; None where another process of the same HDP rank records.
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
        if wanted.trees is not None:
            for document, start, places in wanted.document_runs(wanted.trees):
                sample = given.segment_samples[document]
                rows.append((sample, start, start + len(places), _checksum(given.tokens[places])))
            continue
        ends = np.cumsum(wanted.segment_stops - wanted.segment_starts)
        columns = (given.segment_samples, wanted.segment_starts, wanted.segment_stops, ends)
        for sample, start, stop, end in zip(*(column.tolist() for column in columns), strict=True):
            if stop > start:
                rows.append((sample, start, stop, _checksum(given.tokens[end - (stop - start) : end])))
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def new_attempt_folder(folder: Path) -> Path:
    """Make the folder of the next attempt below ``folder``."""
    number = max((_number(path) for path in folder.glob("attempt-*")), default=0) + 1
    path = folder / f"attempt-{number:04d}"
    path.mkdir(parents=True)
    return path


def read_record(folder: Path, num_steps: int) -> list[tuple[IntArray, int]]:
    """Return what trained the weights in each step: rows of ``segments_of`` of all ranks, and ``data.batch_tokens``.

    Raises ``DataError`` if a step or a rank is missing.
    """
    given: dict[int, dict[int, IntArray]] = {}
    needed: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for attempt in sorted(folder.glob("attempt-*"), key=_number):
        of_attempt: dict[int, dict[int, IntArray]] = {}
        for path in attempt.glob("rank-*.jsonl"):
            for line in read_text(path, 2**30).splitlines(keepends=True):
                if not line.endswith("\n"):  # cut off by kill -9, before the step was handed out
                    continue
                content = parse_json(line)
                segments = np.array(content["segments"], dtype=np.int64).reshape(-1, 4)
                of_attempt.setdefault(content["step"], {})[_number(path)] = segments
                needed[content["step"]] = content["num_ranks"]
                sizes[content["step"]] = content["batch_tokens"]
        given.update(of_attempt)
    for step in range(num_steps):
        num_given = len(given.get(step, {}))
        if num_given != needed.get(step, 1):
            raise DataError(
                f"{folder} has {num_given} of {needed.get(step, 'all')} ranks' records of step {step}",
                so="what the run was trained on cannot be counted",
                fix="record runs with data.record = true from their first step on, and keep the record whole",
            )
    return [(np.concatenate([_NO_SEGMENTS, *given[step].values()]), sizes[step]) for step in range(num_steps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCheck:
    """What a record without errors contains."""

    num_steps: int
    num_tokens: int
    num_attempts: int


def check_record(folder: Path, num_steps: int, corpus: Corpus, config: DataConfig) -> RecordCheck:
    """Compare every token range of a record with the batches that the seed and the corpus ask for.

    Raises ``DataError`` for the first step in which a token was lost, given twice, or differs from the corpus.
    """
    sampler = BatchSampler(corpus.index, config)
    num_tokens = 0
    for step, (segments, batch_size) in enumerate(read_record(folder, num_steps)):
        if batch_size != config.batch_tokens:
            config = replace(config, batch_tokens=batch_size)
            sampler = BatchSampler(corpus.index, config, sampler.state_dict())
        batch = sampler.next_batch()
        names, starts, stops, checksums = segments.T
        samples, row_of = batch.samples, {name: row for row, name in enumerate(batch.samples.name.tolist())}
        if _coverage(names, starts, stops) != _coverage(samples.name, np.zeros_like(samples.length), samples.length):
            count, wanted = int((stops - starts).sum()), batch.num_tokens
            raise _wrong(step, f"its ranks were given {count} tokens, which are not exactly the {wanted} of its batch")
        rows = np.array([row_of[name] for name in names.tolist()], dtype=np.int64)
        slices = corpus.parts.slices(samples.part[rows], samples.start[rows] + starts, stops - starts)
        for number, (tokens, _) in enumerate(slices):
            if _checksum(tokens) != checksums[number]:
                document = f"document {samples.document[rows[number]]} of part {samples.part[rows[number]]}"
                raise _wrong(step, f"tokens {starts[number]} to {stops[number]} of a sample of {document} differ")
        num_tokens += batch.num_tokens
    attempts = len(list(folder.glob("attempt-*")))
    return RecordCheck(num_steps=num_steps, num_tokens=num_tokens, num_attempts=attempts)


def _coverage(names: IntArray, starts: IntArray, stops: IntArray) -> dict[tuple[int, int], int]:
    """By sample and token, by how much the number of ranges changes that cover the sample's tokens."""
    changes = Counter(zip(names.tolist(), starts.tolist(), strict=True))
    changes.subtract(Counter(zip(names.tolist(), stops.tolist(), strict=True)))
    return {place: change for place, change in changes.items() if change}


def _checksum(tokens: NDArray[np.integer]) -> int:
    return zlib.crc32(np.ascontiguousarray(tokens, dtype="<i8").data)


def _number(path: Path) -> int:
    found = re.search(r"-(\d+)", path.name)
    assert found, f"{path} is numbered"
    return int(found[1])


def _wrong(step: int, what: str) -> DataError:
    return DataError(
        f"step {step}: {what}",
        so="the run did not train on the batches that the seed and the corpus ask for",
        fix="restore [data] as it was when the run began; if it did not change, report this as a bug",
    )
