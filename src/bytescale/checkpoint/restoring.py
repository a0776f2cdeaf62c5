"""Fills an optimizer's states, or single tensors, from a checkpoint of format 2 or 3 that any mesh has written."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bytescale.checkpoint import format_2, format_2_states
from bytescale.checkpoint.agree import settle
from bytescale.checkpoint.folders import Folder, LocalFolder, open_folder
from bytescale.checkpoint.manifest import (
    FORMAT,
    CheckpointDamage,
    Manifest,
    RunState,
    manifest_of,
    read_state_json,
    run_state_of,
    wrong_companions,
)
from bytescale.checkpoint.reading import CheckpointReader, Wanted
from bytescale.checkpoint.writing import layout_of
from bytescale.common.errors import BytescaleError, CheckpointError, problem
from bytescale.runtime import ShardedAdamW

Place = str | Path
"""A folder, or its URL."""


def read_run_state(place: Place) -> RunState:
    """What a checkpoint says of itself. Raises ``CheckpointError`` for a folder that is none."""
    folder = open_folder(place)
    content = read_state_json(folder)
    return manifest_of(folder, content).state if content["format"] == FORMAT else run_state_of(folder, content)


def load_states(
    place: Place, optimizer: ShardedAdamW, group: dist.ProcessGroup, *, only: Sequence[str] | None = None
) -> None:
    """Fill this rank's parts of the states, or ``only`` some of them. All ranks of ``group`` call it.

    Raises ``CheckpointError`` on every rank when a rank could not read what it needs. States may be partly filled.
    """
    error: Exception | None = None
    folder, old = open_folder(place), False
    try:
        content = read_state_json(folder)
        old = content["format"] != FORMAT
        if not old:
            _fill(CheckpointReader(folder, manifest_of(folder, content)), optimizer, only)
    except BytescaleError as caught:
        error = caught
    settle(error, group)
    if old:
        format_2_states.load_states(_local(folder), optimizer, group, only=only)


def check_same_model(place: Place, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise ``CheckpointError`` when two architectures differ, with what differs."""
    different = [
        f"{key} {there.get(key)} there, {here.get(key)} here"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    ]
    if different:
        raise CheckpointError(
            problem(
                f"{place} is a checkpoint of another model ({'; '.join(different)})",
                so="its weights do not fit",
                fix="resume with the config.toml of its run folder, or start a new run",
            )
        )


class StoredTensors:
    """The whole tensors of a checkpoint, for one process, one at a time."""

    def __init__(self, place: Place) -> None:
        """Raises ``CheckpointError`` for a folder that is no checkpoint, or whose names and shapes cannot be read."""
        self.folder = open_folder(place)
        content = read_state_json(self.folder)
        self.state = run_state_of(self.folder, content)
        self.manifest: Manifest | None = None
        if content["format"] == FORMAT:
            self.manifest = manifest_of(self.folder, content)
            for wrong in wrong_companions(self.folder, self.manifest):  # they are copied or read as settings
                raise CheckpointDamage(wrong)
            self._reader = CheckpointReader(self.folder, self.manifest)
            return
        self._metadata = format_2.read_metadata(_local(self.folder))
        self._old: dict[str, Any] = self._metadata.state_dict_metadata

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by the name ``state.parameter``."""
        if self.manifest is not None:
            shapes = {name: entry.shape for name, entry in self.manifest.entries().items()}
            return {f"{state}.{name}": shape for state in self.manifest.states for name, shape in shapes.items()}
        return {name: tuple(stored.size) for name, stored in self._old.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor that format 2 stores."""
        return self._old[name].properties.dtype

    def read(self, name: str) -> Tensor:
        """A whole tensor by the name ``state.parameter``. Raises ``CheckpointError``."""
        state, _, parameter = name.partition(".")
        if self.manifest is not None:
            return self._reader.whole(state, parameter)
        if name not in self._old:
            raise CheckpointError(
                problem(f"{self.folder} has no {name}", fix="name a complete checkpoint of this model")
            )
        whole = torch.empty(self._old[name].size, dtype=self._old[name].properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant
            format_2.load_tensors(
                _local(self.folder), {name: whole}, planner=format_2.TensorPlanner(), metadata=self._metadata
            )
        return whole


def _fill(reader: CheckpointReader, optimizer: ShardedAdamW, only: Sequence[str] | None) -> None:
    layout = layout_of(optimizer)
    places = optimizer.parameters.shards(optimizer.hdp.rank)
    pieces = list(layout.pieces(optimizer.hdp.rank))
    wanted = []
    for state, parts in optimizer.states().items():
        if only is None or state in only:
            for piece in pieces:
                begin = places[piece.bucket].start
                target = parts[piece.bucket][piece.start - begin : piece.stop - begin].view(piece.box[1])
                wanted.append(Wanted(state, piece.entry.name, piece.box, target))
    reader.fill(wanted)


def _local(folder: Folder) -> Path:
    if not isinstance(folder, LocalFolder):
        raise CheckpointError(
            problem(
                f"{folder} is a checkpoint of format 2, which is read from local folders alone",
                fix="download it, and upgrade it with `bytescale checkpoint upgrade FOLDER`",
            )
        )
    return folder.path
