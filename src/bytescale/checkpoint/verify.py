"""Checks a whole checkpoint: every file that it should have, every byte of them, and no file more."""

from __future__ import annotations

from typing import NamedTuple

from bytescale.checkpoint.manifest import (
    MANIFEST,
    CheckpointDamage,
    Manifest,
    damaged,
    file_name,
    read_manifest,
    unreachable,
)
from bytescale.checkpoint.tensor_file import TensorFile
from bytescale.common.errors import BytescaleError
from bytescale.storage.place import Place, file_sizes


def problems_of(folder: Place) -> list[str]:
    """What is wrong with a checkpoint; an empty list: every byte is what was written.

    Raises ``CheckpointError`` if the folder is no checkpoint, or cannot be reached.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointDamage as damage:
        return [str(damage)]
    found = wrong_files(folder, manifest)
    if found:
        return found
    for number, written in enumerate(manifest.files):
        try:
            file = TensorFile(folder, file_name(number), written)
            for piece in file.tensors:
                list(file.read([piece]))
        except CheckpointDamage as damage:
            found.append(str(damage))
    return found


def wrong_files(folder: Place, manifest: Manifest) -> list[str]:
    """Files that are missing, surplus or of another size. Reads no file."""
    there = _sizes(folder)
    sizes = {file_name(number): file.num_bytes for number, file in enumerate(manifest.files)}
    found = [str(damaged(folder, name, "the file is missing")) for name in sizes if name not in there]
    found += [
        str(damaged(folder, name, f"it has {there[name]} bytes, and {size} were written"))
        for name, size in sizes.items()
        if name in there and there[name] != size
    ]
    surplus = sorted(set(there) - {MANIFEST, *sizes})
    return found + [str(damaged(folder, name, "the file does not belong to the checkpoint")) for name in surplus]


class ListedCheckpoint(NamedTuple):
    """One line of ``bytescale checkpoint list``."""

    name: str
    num_bytes: int
    mesh: dict[str, int]
    wrong: str
    """Why it is not whole; empty: every file is there in its size."""


def listed(folder: Place) -> ListedCheckpoint:
    """Raises ``CheckpointError`` if the folder cannot be reached."""
    num_bytes = sum(_sizes(folder).values())
    try:
        manifest = read_manifest(folder)
        wrong = wrong_files(folder, manifest)
        return ListedCheckpoint(folder.name, num_bytes, manifest.state.mesh, "".join(wrong[:1]))
    except BytescaleError as error:
        return ListedCheckpoint(folder.name, num_bytes, {}, str(error))


def _sizes(folder: Place) -> dict[str, int]:
    try:
        return file_sizes(folder)
    except OSError as error:
        raise unreachable(error, folder) from error
