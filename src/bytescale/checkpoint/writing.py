"""Writes a checkpoint: every rank its own file, and the first rank the manifest behind them.

All ranks learn a few numbers of each rank's file, and the layouts of each HDP group: some 60 bytes a rank and 100 bytes
a parameter.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bytescale.checkpoint.agree import together
from bytescale.checkpoint.layout import Layout, LayoutEntry, LayoutPiece
from bytescale.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    RunState,
    StoredFile,
    checksum_of,
    file_name,
    layout_from_json,
    layout_to_json,
)
from bytescale.checkpoint.tensor_file import METADATA, piece_name
from bytescale.common.atomic import sync_folder
from bytescale.common.errors import DiskFullError
from bytescale.common.units import format_bytes
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import FlatParameters, Range, values_of
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.plain_data import all_gather_json, broadcast_json

_ROOM_FOR_LOGS = 2**20
_SYNCED_BYTES = 2**30
"""So much may wait for a disk at once: it takes longer than a rank may be silent only if the disk does not answer."""
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class RankStates:
    """What one rank holds."""

    file: int  # its number, which is that of the rank
    layouts: Sequence[Layout]  # of the flat buffers of the rank's HDP group
    states: Sequence[Mapping[str, Sequence[Range]]]  # of each buffer by name: this rank's ranges

    @staticmethod
    def of(optimizer: ShardedOptimizer) -> RankStates:
        """The optimizer's own memory."""
        layouts = [layout_of(zero.parameters, optimizer.mesh) for zero in optimizer.zeros]
        return RankStates(optimizer.mesh.world.rank, layouts, [optimizer.states(zero) for zero in optimizer.zeros])

    def copied(self) -> RankStates:
        """In host memory, so that training may go on while the copies are written."""
        copies = [
            {
                name: [Range(own.start, own.values.detach().to("cpu", copy=True)) for own in ranges]
                for name, ranges in states.items()
            }
            for states in self.states
        ]
        return replace(self, states=copies)

    def parts(self) -> Iterator[tuple[str, LayoutPiece, Tensor]]:
        """The rectangles of this rank, state by state in the order of each buffer. The tensors are views."""
        for layout, states in zip(self.layouts, self.states, strict=True):
            pieces = list(layout.pieces(self.file))
            for state, ranges in states.items():
                for piece in pieces:
                    yield state, piece, values_of(ranges, piece.start, piece.stop).view(piece.box[1])

    def tensors(self) -> dict[str, Tensor]:
        """What this rank writes, by name."""
        written = ((state, piece, part) for state, piece, part in self.parts() if piece.entry.written)
        return {piece_name(state, piece.entry.name, piece.box): part for state, piece, part in written}


def layout_of(parameters: FlatParameters, mesh: Mesh) -> Layout:
    """The layout of a flat buffer. Files have the numbers of the ranks that write them."""
    entries = []
    for entry in parameters.entries:
        start, written = entry.start, entry.cut.replica == 0
        for offsets, sizes in entry.cut.boxes():
            entries.append(LayoutEntry(entry.name, entry.cut.shape, offsets, sizes, start, written=written))
            start = entries[-1].stop
    in_order = sorted(range(mesh.hdp.size), key=parameters.part_of)
    return Layout(
        entries=tuple(entries),
        bounds=(0, *(bucket.stop for bucket in parameters.buckets)),
        files=tuple(mesh.shape.rank(mesh.stage, rank, mesh.tp.rank) for rank in in_order),
    )


def write_checkpoint(folder: Path, state: RunState, copies: RankStates, group: dist.ProcessGroup) -> None:
    """Write a whole checkpoint into ``folder``. All ranks of ``group`` call it.

    Raises the same on every rank:
        DiskFullError: there is no room; nothing was written.
        CheckpointError: a rank could not write.
    """
    tensors = copies.tensors()
    own_bytes = sum(tensor.nbytes for tensor in tensors.values())
    total_bytes = torch.tensor([own_bytes])
    dist.all_reduce(total_bytes, group=group)
    is_first = group.rank() == 0
    with together(group):
        if is_first:
            folder.mkdir(parents=True, exist_ok=True)
    is_shared = folder.is_dir()  # by the nodes of all ranks; otherwise each node keeps what its own ranks write
    needed = int(total_bytes) if is_shared else own_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with together(group):  # before any rank takes up space
        make_room(folder, needed)
    with together(group, what=f"writing to {folder}") as progressed:
        written = write_tensors(folder / file_name(copies.file), tensors, state.step, progressed)
    is_leader = copies.file == min(copies.layouts[0].files)  # of its HDP group
    rows = all_gather_json([copies.file, is_leader, *written], group)
    own = [layout_to_json(layout) for layout in copies.layouts]
    leaders = [rank for rank, row in enumerate(rows) if row[1]]
    layouts = [layout for leader in leaders for layout in broadcast_json(own, group, leader)]
    with together(group):
        if is_first:
            manifest = Manifest(
                state=state,
                states=list(copies.states[0]),
                layouts=list(map(layout_from_json, layouts)),
                files=[StoredFile(*row[2:]) for row in sorted(rows)],
            )
            write_to_disk(folder / MANIFEST, [manifest.to_json()])
            sync_folder(folder)


def make_room(folder: Path, num_bytes: int) -> None:
    """Make ``folder``. Raises ``DiskFullError`` unless a checkpoint of ``num_bytes``, and the run's logs, have room."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _ROOM_FOR_LOGS:
        raise DiskFullError(
            f"the disk that holds {folder.parent} has {format_bytes(free)} free, and a checkpoint takes "
            f"{format_bytes(num_bytes)}",
            so="nothing was written",
            fix="free some space, or lower checkpoint.keep",
        )


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], step: int, progressed: Callable[[], None] = lambda: None
) -> StoredFile:
    """Write the file of ``tensor_file`` and wait until it is on disk. Raises ``OSError``.

    ``progressed`` is called now and then, as long as the disk takes what is written.
    """
    header = _header(tensors, step)
    progressed()
    write_to_disk(path, [header, *map(bytes_of, tensors.values())], progressed)
    total = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    return StoredFile(num_bytes=total, header_bytes=len(header), checksum=checksum_of(header))


def write_to_disk(
    path: Path, contents: Iterable[bytes | memoryview], progressed: Callable[[], None] = lambda: None
) -> None:
    """Write ``contents``, one behind the other, and wait until they are on disk. Raises ``OSError``.

    ``progressed`` is called behind every part that is on disk.
    """
    unsynced = 0
    with path.open("wb") as file:
        for content in contents:
            file.write(content)
            unsynced += len(content)
            if unsynced >= _SYNCED_BYTES:
                os.fsync(file.fileno())
                unsynced = 0
            progressed()
        file.flush()
        os.fsync(file.fileno())


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    content: Any = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(content)


def _header(tensors: Mapping[str, Tensor], step: int) -> bytes:
    sums = {name: checksum_of(bytes_of(tensor)) for name, tensor in tensors.items()}
    content: dict[str, Any] = {"__metadata__": {METADATA: json.dumps({"step": step, "checksums": sums})}}
    end = 0
    for name, tensor in tensors.items():
        place = [end, end + tensor.nbytes]
        content[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        end = place[1]
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
