"""``bytescale checkpoint``: what a run's checkpoints are, whether every byte is right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from bytescale.common.errors import CheckpointError
from bytescale.common.units import format_bytes
from bytescale.config.load import load_config

if TYPE_CHECKING:
    from bytescale.storage.place import Place


@dataclass(slots=True, kw_only=True)
class CheckpointOptions:
    folder: Annotated[str, tyro.conf.Positional]
    """A run folder, a checkpoint, or the folder or URL that holds checkpoints."""

    def checkpoints(self) -> list[Place]:
        """The folders of the checkpoints, the oldest first. Raises ``CheckpointError`` where there is none."""
        from bytescale.checkpoint.manifest import MANIFEST, step_name, steps_in, unreachable
        from bytescale.storage.place import file_sizes, is_url, place_at

        config, place = Path(self.folder) / "config.toml", self.folder
        if not is_url(place) and config.is_file():
            place = load_config(config).checkpoint.folder or str(Path(place) / "checkpoints")
        folder = place_at(place)
        try:
            found = [folder / step_name(step) for step in steps_in(folder)]
            found = found or ([folder] if MANIFEST in file_sizes(folder) else [])
        except OSError as error:
            raise unreachable(error, place) from error
        if not found:
            raise CheckpointError(
                f"there is no checkpoint in {place}", fix="name a folder checkpoints/step-*, or a run"
            )
        return found


@dataclass(slots=True, kw_only=True)
class ListOptions(CheckpointOptions):
    """List the checkpoints of a run: step, size, the mesh that wrote it, and whether every file is there."""

    def run(self) -> int:
        """Return the exit code: 1 where a checkpoint is not whole."""
        from bytescale.checkpoint.verify import listed

        found = [listed(folder) for folder in self.checkpoints()]
        for one in found:
            mesh = " x ".join(f"{name} {size}" for name, size in one.mesh.items()) or "one process"
            print(f"{one.name}  {format_bytes(one.num_bytes):>10}  {mesh}  {one.wrong or 'whole'}")
        return int(any(one.wrong for one in found))


@dataclass(slots=True, kw_only=True)
class VerifyOptions(CheckpointOptions):
    """Read every byte of a checkpoint, or of all checkpoints of a run, and compare checksums."""

    def run(self) -> int:
        """Return the exit code: 1 where a checkpoint is not whole."""
        from bytescale.checkpoint.verify import problems_of

        wrong = 0
        for folder in self.checkpoints():
            try:
                found = problems_of(folder)
            except CheckpointError as error:
                found = [str(error)]
            wrong += bool(found)
            said = "\n  ".join(["not whole", *found]) if found else "every byte is what was written"
            print(f"{folder}: {said}")
        return int(wrong > 0)
