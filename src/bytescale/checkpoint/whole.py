"""Writes a checkpoint from one process, tensor by tensor: for imports."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bytescale.checkpoint.disk import Disk, check_room, checksum_of
from bytescale.checkpoint.layout import Box, Layout, LayoutEntry
from bytescale.checkpoint.manifest import MANIFEST, Manifest, RunState, StoredFile, file_name
from bytescale.checkpoint.tensor_file import piece_name
from bytescale.checkpoint.writing import TensorHead, write_tensors

_FILE_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A parameter, or a rectangle of one; ``read`` gives a state of it when its turn has come."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[str], Tensor]


def write_whole(
    disk: Disk, folder: Path, state: RunState, states: Sequence[str], parts: Sequence[Part], companions: Sequence[str]
) -> None:
    """Write a checkpoint into ``folder``, which exists and already holds the files ``companions``.

    Raises ``OSError``, and ``DiskFullError`` before anything is written.
    """
    check_room(disk, folder, len(states) * sum(_num_bytes(part) for part in parts))
    layouts: list[Layout] = []
    files: list[StoredFile] = []
    for own in _files(parts, len(states)):
        layout = _layout(own, len(files))
        boxes_by_start: dict[int, list[Box]] = defaultdict(list)
        for piece in layout.pieces(0):
            boxes_by_start[piece.entry.start].append(piece.box)
        cut = [boxes_by_start[entry.start] for entry in layout.entries]
        heads = [
            TensorHead(piece_name(name, part.name, box), part.dtype, box[1])
            for name in states
            for part, boxes in zip(own, cut, strict=True)
            for box in boxes
        ]
        tensors = (
            tensor
            for name in states
            for part, boxes in zip(own, cut, strict=True)
            for tensor in part.read(name).reshape(-1).split([math.prod(sizes) for _, sizes in boxes])
        )
        files.append(write_tensors(disk, folder / file_name(len(files)), heads, tensors, step=state.step))
        layouts.append(layout)
    known = {name: _size_and_checksum(folder / name) for name in companions}
    manifest = Manifest(state=state, states=states, layouts=layouts, files=files, companions=known)
    disk.write_file(folder / MANIFEST, manifest.to_json())
    disk.sync_folder(folder)


def _files(parts: Sequence[Part], num_states: int) -> Iterator[list[Part]]:
    """Parts of one file each: as many as 4 GiB hold, and at least one."""
    own: list[Part] = []
    for part in parts:
        if own and num_states * sum(map(_num_bytes, [*own, part])) > _FILE_BYTES:
            yield own
            own = []
        own.append(part)
    if own:
        yield own


def _layout(parts: Sequence[Part], number: int) -> Layout:
    """One shard with the parts one behind the other."""
    entries, start = [], 0
    for part in parts:
        entry = LayoutEntry(
            name=part.name, shape=part.shape, offsets=part.offsets, sizes=part.sizes, start=start, written=True
        )
        entries.append(entry)
        start = entry.stop
    return Layout(entries=tuple(entries), bounds=(0, start), num_shards=1, first_file=number)


def _num_bytes(part: Part) -> int:
    return math.prod(part.sizes) * part.dtype.itemsize


def _size_and_checksum(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    return len(content), checksum_of(content)
