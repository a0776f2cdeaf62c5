"""Writes a checkpoint: every rank its own file, and the first rank the manifest behind them.

The first rank learns four numbers of each rank's file, and one layout of each HDP group: 32 bytes a rank and some 100
bytes a parameter, whatever the number of ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bytescale.checkpoint.agree import attempt, settle
from bytescale.checkpoint.disk import checksum_of, make_room, write_to_disk
from bytescale.checkpoint.layout import Layout, LayoutEntry
from bytescale.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    RunState,
    StoredFile,
    file_name,
    layout_from_json,
    layout_to_json,
)
from bytescale.checkpoint.tensor_file import METADATA, piece_name
from bytescale.common.atomic import sync_folder
from bytescale.common.errors import CheckpointError
from bytescale.runtime import Range, ShardedOptimizer, values_of
from bytescale.runtime.optimizer.units import DomainParameters

_TAG = 7
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank writes."""

    layout: Layout  # of the rank's HDP group
    shard: int  # the rank's number in that group
    states: Mapping[str, Sequence[Range]]  # by name, copies on the CPU of this rank's ranges

    @staticmethod
    def of(optimizer: ShardedOptimizer) -> Snapshot:
        """Copy this rank's states to host memory, so that training may go on while they are written."""
        copies = {
            name: [Range(own.start, own.values.detach().to("cpu", copy=True)) for own in ranges]
            for name, ranges in optimizer.states().items()
        }
        return Snapshot(layout_of(optimizer), optimizer.group.rank, copies)

    def tensors(self) -> dict[str, Tensor]:
        """The rectangles of this rank by name, state by state in the buffer's order. They are views."""
        pieces = [piece for piece in self.layout.pieces(self.shard) if piece.entry.written]
        return {
            piece_name(state, piece.entry.name, piece.box): values_of(ranges, piece.start, piece.stop).view(
                piece.box[1]
            )
            for state, ranges in self.states.items()
            for piece in pieces
        }


def layout_of(optimizer: ShardedOptimizer) -> Layout:
    """The layout of this rank's HDP group. Files have the numbers of the ranks that write them."""
    mesh, bounds, domain_start = optimizer.mesh, [0], 0
    entries = []
    places = [(offset, entry) for zero, offset in optimizer.offsets.items() for entry in zero.parameters.entries]
    for offset, entry in places:
        offsets = [0] * len(entry.cut.shape)
        if entry.cut.count > 1:
            offsets[entry.cut.dim] = entry.cut.start
        entries.append(
            LayoutEntry(
                name=entry.name,
                shape=tuple(entry.cut.shape),
                offsets=tuple(offsets),
                sizes=tuple(entry.shape),
                start=offset + entry.start,
                written=entry.cut.replica == 0,
            )
        )
    for zero, offset in optimizer.offsets.items():
        bounds += [offset + bucket.stop for bucket in zero.parameters.buckets]
        if not isinstance(zero.parameters, DomainParameters):
            domain_start = bounds[-1]
    return Layout(
        entries=tuple(entries),
        bounds=tuple(bounds),
        num_shards=mesh.hdp.size,
        domain=mesh.domain.size,
        domain_start=domain_start if mesh.domain.size > 1 else 0,
        first_file=mesh.shape.rank(mesh.stage, 0, mesh.tp.rank),
        stride=mesh.shape.tp,
    )


def write_checkpoint(folder: Path, state: RunState, snapshot: Snapshot, group: dist.ProcessGroup) -> None:
    """Write a whole checkpoint into ``folder``. All ranks of ``group`` call it.

    Raises the same on every rank:
        DiskFullError: there is no room; nothing was written.
        CheckpointError: a rank could not write.
    """
    tensors = snapshot.tensors()
    own_bytes = sum(tensor.nbytes for tensor in tensors.values())
    total_bytes = torch.tensor([own_bytes])
    dist.all_reduce(total_bytes, group=group)
    is_first = group.rank() == 0
    settle(attempt(lambda: folder.mkdir(parents=True, exist_ok=True)) if is_first else None, group)
    is_shared = folder.is_dir()  # by the nodes of all ranks; otherwise each node keeps what its own ranks write
    needed = int(total_bytes) if is_shared else own_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    settle(attempt(lambda: make_room(folder, needed)), group)  # before any rank takes up space
    path, written = folder / file_name(snapshot.layout.file_of(snapshot.shard)), list[StoredFile]()
    settle(attempt(lambda: written.append(write_tensors(path, tensors, state.step))), group)
    rows, layouts = _gather(written[0], snapshot, group)
    manifest = Manifest(state=state, states=list(snapshot.states), layouts=layouts, files=rows)

    def complete() -> None:
        write_to_disk(folder / MANIFEST, [manifest.to_json()])
        sync_folder(folder)

    settle(attempt(complete) if is_first else None, group)


def _gather(written: StoredFile, snapshot: Snapshot, group: dist.ProcessGroup) -> tuple[list[StoredFile], list[Layout]]:
    """On the first rank, what every rank wrote, and the layout of every HDP group; elsewhere both are empty."""
    is_leader = snapshot.shard == 0
    layout = json.dumps(layout_to_json(snapshot.layout)).encode() if is_leader else b""
    number = snapshot.layout.file_of(snapshot.shard)
    checksum = int(written.checksum, 16) - 2**63  # into the range of int64
    own = torch.tensor([number, written.num_bytes, written.header_bytes, checksum, len(layout)])
    if group.rank():
        dist.gather(own, None, group=group, group_dst=0)
        if layout:
            group.send([torch.frombuffer(bytearray(layout), dtype=torch.uint8)], 0, _TAG).wait()
        return [], []
    table = torch.empty(group.size(), 5, dtype=torch.int64)
    dist.gather(own, list(table), group=group, group_dst=0)
    rows = table.tolist()
    if sorted(row[0] for row in rows) != list(range(group.size())):
        raise CheckpointError("two ranks write the same file")  # pragma: no cover, a mesh that is none
    layouts = []
    for rank, row in enumerate(rows):
        if rank and row[4]:
            received = torch.empty(row[4], dtype=torch.uint8)
            group.recv([received], rank, _TAG).wait()
            layouts.append(layout_from_json(json.loads(received.numpy().tobytes()), len(rows)))
        elif row[4]:
            layouts.append(snapshot.layout)
    files = {row[0]: StoredFile(row[1], row[2], f"{row[3] + 2**63:016x}") for row in rows}
    return [files[number] for number in range(len(rows))], layouts


def write_tensors(path: Path, tensors: Mapping[str, Tensor], step: int) -> StoredFile:
    """Write the file of ``tensor_file`` and wait until it is on disk. Raises ``OSError``."""
    header = _header(tensors, step)
    write_to_disk(path, [header, *map(bytes_of, tensors.values())])
    total = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    return StoredFile(num_bytes=total, header_bytes=len(header), checksum=checksum_of(header))


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
