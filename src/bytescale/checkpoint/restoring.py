"""Fills an optimizer's states, or single tensors, from a checkpoint that any mesh has written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from bytescale.checkpoint.agree import settle
from bytescale.checkpoint.folders import open_folder
from bytescale.checkpoint.manifest import CheckpointDamage, RunState, read_manifest, wrong_companions
from bytescale.checkpoint.reading import CheckpointReader, Wanted
from bytescale.checkpoint.writing import layout_of
from bytescale.common.errors import BytescaleError, CheckpointError, problem
from bytescale.runtime import ShardedOptimizer, values_of

Place = str | Path
"""A folder, or its URL."""


def read_run_state(place: Place) -> RunState:
    """What a checkpoint says of itself. Raises ``CheckpointError`` for a folder that is none."""
    return read_manifest(open_folder(place)).state


def load_states(
    place: Place, optimizer: ShardedOptimizer, group: dist.ProcessGroup, *, only: Sequence[str] | None = None
) -> None:
    """Fill this rank's parts of the states, or ``only`` some of them. All ranks of ``group`` call it.

    Raises ``CheckpointError`` on every rank when a rank could not read what it needs. States may be partly filled.
    """
    error: Exception | None = None
    try:
        folder = open_folder(place)
        _fill(CheckpointReader(folder, read_manifest(folder)), optimizer, only)
    except BytescaleError as caught:
        error = caught
    settle(error, group)


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
        self.manifest = read_manifest(self.folder)
        for wrong in wrong_companions(self.folder, self.manifest):  # they are copied or read as settings
            raise CheckpointDamage(wrong)
        self._reader = CheckpointReader(self.folder, self.manifest)

    @property
    def state(self) -> RunState:
        """What the checkpoint says of itself."""
        return self.manifest.state

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by the name ``state.parameter``."""
        shapes = {name: entry.shape for name, entry in self.manifest.entries().items()}
        return {f"{state}.{name}": shape for state in self.manifest.states for name, shape in shapes.items()}

    def read(self, name: str) -> Tensor:
        """A whole tensor by the name ``state.parameter``. Raises ``CheckpointError``."""
        state, _, parameter = name.partition(".")
        return self._reader.whole(state, parameter)


def _fill(reader: CheckpointReader, optimizer: ShardedOptimizer, only: Sequence[str] | None) -> None:
    layout = layout_of(optimizer)
    pieces = list(layout.pieces(optimizer.group.rank))
    wanted = []
    for state, ranges in optimizer.states().items():
        if only is None or state in only:
            for piece in pieces:
                target = values_of(ranges, piece.start, piece.stop).view(piece.box[1])
                wanted.append(Wanted(state, piece.entry.name, piece.box, target))
    reader.fill(wanted)
