"""``bytescale checkpoint``: what a run's checkpoints are, whether every byte is right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bytescale.common.errors import CheckpointError
from bytescale.common.units import format_bytes
from bytescale.config import load_config


@dataclass(slots=True, kw_only=True)
class ListOptions:
    """List the checkpoints of a run: step, size, the mesh that wrote it, and whether every file is there."""

    folder: Annotated[str, tyro.conf.Positional]
    """A run folder, or the folder or URL that holds its checkpoints."""

    def run(self) -> int:
        """Return the exit code: 1 where a checkpoint is not whole."""
        from bytescale.checkpoint.manifest import unreachable
        from bytescale.checkpoint.verify import list_checkpoints
        from bytescale.storage.place import place_at

        place = _checkpoints_of(self.folder)
        try:
            found = list_checkpoints(place_at(place))
        except OSError as error:
            raise unreachable(error, place) from error
        if not found:
            raise CheckpointError(f"there is no checkpoint in {place}", fix="name a run folder")
        for one in found:
            mesh = " x ".join(f"{name} {size}" for name, size in one.mesh.items()) or "one process"
            print(f"{one.name}  {format_bytes(one.num_bytes):>10}  {mesh}  {one.wrong or 'whole'}")
        return int(any(one.wrong for one in found))


@dataclass(slots=True, kw_only=True)
class VerifyOptions:
    """Read every byte of a checkpoint, or of all checkpoints of a run, and compare checksums."""

    folder: Annotated[str, tyro.conf.Positional]
    """A checkpoint, a run folder, or the URL of either."""

    def run(self) -> int:
        """Return the exit code: 1 where a checkpoint is not whole."""
        from bytescale.checkpoint.manifest import MANIFEST, unreachable
        from bytescale.checkpoint.verify import list_checkpoints, problems_of
        from bytescale.storage.place import file_sizes, place_at

        folder = place_at(self.folder)
        try:
            if MANIFEST in file_sizes(folder):
                folders = [folder]
            else:
                parent = place_at(_checkpoints_of(self.folder))
                folders = [parent / one.name for one in list_checkpoints(parent)]
        except OSError as error:
            raise unreachable(error, self.folder) from error
        if not folders:
            raise CheckpointError(
                f"there is no checkpoint in {self.folder}", fix="name a folder checkpoints/step-*, or a run"
            )
        wrong = 0
        for one in folders:
            try:
                found = problems_of(one)
            except CheckpointError as error:
                found = [str(error)]
            wrong += bool(found)
            print(f"{one}: " + ("every byte is what was written" if not found else "\n  ".join(["not whole", *found])))
        return int(wrong > 0)


def _checkpoints_of(place: str) -> str:
    """Where the checkpoints of a run folder are; other folders and URLs are taken to hold checkpoints."""
    config = Path(place) / "config.toml"
    if "://" in place or not config.is_file():
        return place
    return load_config(config).checkpoint.folder or str(Path(place) / "checkpoints")
