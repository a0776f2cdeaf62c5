"""Checks a whole checkpoint: every file that it should have, every byte of them, and no file more."""

from __future__ import annotations

from dataclasses import dataclass

from bytescale.checkpoint.layout import Layout
from bytescale.checkpoint.manifest import (
    MANIFEST,
    CheckpointDamage,
    Manifest,
    damaged,
    file_name,
    read_manifest,
    unreachable,
)
from bytescale.checkpoint.tensor_file import TensorFile, piece_name
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
    shards = {
        layout.file_of(shard): (layout, shard) for layout in manifest.layouts for shard in range(layout.num_shards)
    }
    for number, written in enumerate(manifest.files):
        try:
            _check_file(folder, TensorFile(folder, file_name(number), written), shards.get(number))
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


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
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


def _check_file(folder: Place, file: TensorFile, held: tuple[Layout, int] | None) -> None:
    """Raise ``CheckpointDamage`` unless the file has the pieces that its layout says, and every byte is right."""
    pieces = held[0].pieces(held[1]) if held else ()
    boxes = [(piece.entry.name, piece.box) for piece in pieces if piece.entry.written]
    stored = set(file.pieces())
    states = {piece.partition(".")[0] for piece in stored}
    expected = {piece_name(state, name, box): box for state in states for name, box in boxes}
    odd = sorted(stored.symmetric_difference(expected))
    if odd:
        raise damaged(folder, file.name, f"{odd[0]} is {'surplus' if odd[0] in stored else 'missing'}")
    for name, box in expected.items():
        file.check_shape(name, box[1])
        list(file.read([name]))
