"""A checkpoint of format 2 as one of format 3, in its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bytescale.checkpoint.disk import Disk
from bytescale.checkpoint.folder_of_run import publish
from bytescale.checkpoint.folders import LocalFolder
from bytescale.checkpoint.manifest import FORMAT, read_state_json
from bytescale.checkpoint.restoring import StoredTensors
from bytescale.checkpoint.verify import problems_of
from bytescale.checkpoint.whole import Part, write_whole
from bytescale.common.errors import CheckpointError, problem
from bytescale.models.hf_folder import copy_companions


def upgrade(path: Path, disk: Disk | None = None) -> bool:
    """Write the checkpoint again in format 3, check every byte of it, and only then delete the old one.

    Returns whether there was anything to do. Raises ``CheckpointError`` for a folder that is no checkpoint of format 2
    or 3, or whose tensors cannot be read; it is then left as it was.
    """
    disk = disk or Disk()
    if read_state_json(LocalFolder(path))["format"] == FORMAT:
        return False
    path = path.resolve()
    hidden = path.with_name(f".{path.name}.upgraded.tmp")
    disk.remove_folder(hidden)
    disk.make_folder(hidden)
    try:
        write_upgraded(disk, path, hidden)
        found = problems_of(LocalFolder(hidden))
        if found:
            raise CheckpointError(
                problem(
                    f"the upgraded checkpoint is not what was written: {found[0]}",
                    so=f"{path} was left as it was",
                    fix="look at the disk and the memory of this machine",
                )
            )
        publish(disk, hidden, path)
    finally:
        disk.remove_folder(hidden)
    return True


def write_upgraded(disk: Disk, path: Path, target: Path) -> None:
    """Write the checkpoint of format 2 at ``path`` into the folder ``target`` in format 3."""
    stored = StoredTensors(path)
    shapes = stored.shapes()
    states = list(dict.fromkeys(name.partition(".")[0] for name in shapes))
    parameters = list(dict.fromkeys(name.partition(".")[2] for name in shapes))
    parts = [
        Part(
            name=name,
            shape=shapes[f"{states[0]}.{name}"],
            offsets=(0,) * len(shapes[f"{states[0]}.{name}"]),
            sizes=shapes[f"{states[0]}.{name}"],
            dtype=stored.dtype(f"{states[0]}.{name}"),
            read=lambda state, name=name: stored.read(f"{state}.{name}"),  # type: ignore[misc]
        )
        for name in parameters
    ]
    companions = copy_companions(path, target)
    if (path / "config.json").is_file():
        disk.copy_file(path / "config.json", target / "config.json")
        companions.append("config.json")
    write_whole(disk, target, replace(stored.state, format=FORMAT), states, parts, companions)
