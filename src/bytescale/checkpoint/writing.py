"""Writes a checkpoint: every rank its own file, and the first rank the manifest behind them.

Each rank computes from the mesh and from its flat buffer's layout which rectangles it writes. The first rank learns
four numbers of each rank's file, and one layout of each HDP group, from that group's first rank: 32 bytes a rank and
some 100 bytes a parameter, whatever the number of ranks.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bytescale.checkpoint.agree import attempt, settle
from bytescale.checkpoint.disk import Disk, check_room, checksum_of
from bytescale.checkpoint.layout import Layout, LayoutEntry, LayoutPiece
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
from bytescale.common.errors import CheckpointError
from bytescale.runtime import Range, ShardedOptimizer, values_of
from bytescale.runtime.optimizer.units import UnitParameters

_TAG = 7
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorHead:
    """What the header of a file says of a tensor."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank writes.

    Attributes:
        layout: of the rank's HDP group.
        shard: the rank's number in that group.
        states: by name, copies on the CPU of this rank's ranges.
    """

    layout: Layout
    shard: int
    states: Mapping[str, Sequence[Range]]

    @staticmethod
    def of(optimizer: ShardedOptimizer) -> Snapshot:
        """Copy this rank's states to host memory, so that training may go on while they are written."""
        copies = {
            name: [Range(own.start, own.values.detach().to("cpu", copy=True)) for own in ranges]
            for name, ranges in optimizer.states().items()
        }
        return Snapshot(layout_of(optimizer), optimizer.group.rank, copies)

    def heads(self) -> list[TensorHead]:
        """The rectangles of this rank in the order of its file: state by state, as the buffer has them."""
        return [
            TensorHead(piece_name(state, piece.entry.name, piece.box), ranges[0].values.dtype, piece.box[1])
            for state, ranges in self.states.items()
            for piece in self._pieces()
        ]

    def tensors(self) -> Iterator[Tensor]:
        """The content of ``heads``."""
        for ranges in self.states.values():
            for piece in self._pieces():
                yield values_of(ranges, piece.start, piece.stop)

    def _pieces(self) -> list[LayoutPiece]:
        return [piece for piece in self.layout.pieces(self.shard) if piece.entry.written]


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
        if not isinstance(zero.parameters, UnitParameters):
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


def write_checkpoint(disk: Disk, folder: Path, state: RunState, snapshot: Snapshot, group: dist.ProcessGroup) -> None:
    """Write a whole checkpoint into ``folder``. All ranks of ``group`` call it.

    Raises the same on every rank:
        DiskFullError: there is no room; nothing was written.
        CheckpointError: a rank could not write.
    """
    heads = snapshot.heads()
    own_bytes = sum(head.num_bytes for head in heads)
    total_bytes = torch.tensor([own_bytes])
    dist.all_reduce(total_bytes, group=group)
    is_first = group.rank() == 0
    settle(attempt(lambda: disk.make_folder(folder)) if is_first else None, group)
    is_shared = folder.is_dir()  # by the nodes of all ranks; otherwise each node keeps what its own ranks write
    needed = int(total_bytes) if is_shared else own_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    settle(attempt(lambda: _make_room(disk, folder, needed)), group)  # before any rank takes up space
    path, written = folder / file_name(snapshot.layout.file_of(snapshot.shard)), list[StoredFile]()
    settle(
        attempt(lambda: written.append(write_tensors(disk, path, heads, snapshot.tensors(), step=state.step))), group
    )
    rows, layouts = _gather(written[0], snapshot, group)
    manifest = Manifest(state=state, states=list(snapshot.states), layouts=layouts, files=rows)
    settle(attempt(lambda: _write_manifest(disk, folder, manifest)) if is_first else None, group)


def _write_manifest(disk: Disk, folder: Path, manifest: Manifest) -> None:
    disk.write_file(folder / MANIFEST, manifest.to_json())
    disk.sync_folder(folder)


def _make_room(disk: Disk, folder: Path, num_bytes: int) -> None:
    disk.make_folder(folder)
    check_room(disk, folder, num_bytes)


def _gather(written: StoredFile, snapshot: Snapshot, group: dist.ProcessGroup) -> tuple[list[StoredFile], list[Layout]]:
    """Return what every rank wrote, and the layout of every HDP group. On all ranks but the first both are empty."""
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


def write_tensors(
    disk: Disk, path: Path, heads: Sequence[TensorHead], tensors: Iterable[Tensor], *, step: int
) -> StoredFile:
    """Write the file of ``tensor_file`` and wait until it is on disk. Raises ``OSError``.

    The header is written twice: first to take up its place, and when all checksums are known. Of ``tensors``, one at a
    time is in use.
    """
    blank = _header(heads, ["0" * 16] * len(heads), step)
    checksums: list[str] = []
    with disk.create(path) as file:
        disk.write(file, blank)
        for head, tensor in zip(heads, tensors, strict=True):
            content = bytes_of(tensor.to(head.dtype).contiguous())
            assert len(content) == head.num_bytes, f"{head.name} is not what was announced"
            checksums.append(checksum_of(content))
            disk.write(file, content)
        header = _header(heads, checksums, step)
        assert len(header) == len(blank), "checksums have a fixed width"
        file.seek(0)
        disk.write(file, header)
        disk.sync(file)
    total = len(header) + sum(head.num_bytes for head in heads)
    return StoredFile(num_bytes=total, header_bytes=len(header), checksum=checksum_of(header))


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    content: Any = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(content)


def _header(heads: Sequence[TensorHead], checksums: Sequence[str], step: int) -> bytes:
    sums = {head.name: checksum for head, checksum in zip(heads, checksums, strict=True)}
    content: dict[str, Any] = {"__metadata__": {METADATA: json.dumps({"step": step, "checksums": sums})}}
    end = 0
    for head in heads:
        place = [end, end + head.num_bytes]
        content[head.name] = {"dtype": _NAMES[head.dtype], "shape": list(head.sizes), "data_offsets": place}
        end = place[1]
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


_FILE_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A parameter, or a rectangle of one; ``read`` gives it when its turn has come."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]


def write_weights(folder: Path, state: RunState, parts: Sequence[Part], companions: Sequence[str]) -> None:
    """Write a checkpoint of master weights in fp32, and nothing else, into ``folder``.

    The folder exists and already holds the files ``companions``. Raises ``OSError``, and ``DiskFullError`` before
    anything is written.
    """
    disk, files, layouts = Disk(), list[StoredFile](), list[Layout]()
    check_room(disk, folder, sum(map(_num_bytes, parts)))
    for own in _files(parts):
        layout = _layout(own, len(files))
        heads = [
            TensorHead(piece_name("master", piece.entry.name, piece.box), torch.float32, piece.box[1])
            for piece in layout.pieces(0)
        ]
        files.append(write_tensors(disk, folder / file_name(len(files)), heads, _cut(own, layout), step=state.step))
        layouts.append(layout)
    contents = {name: (folder / name).read_bytes() for name in companions}
    known = {name: (len(content), checksum_of(content)) for name, content in contents.items()}
    manifest = Manifest(state=state, states=["master"], layouts=layouts, files=files, companions=known)
    _write_manifest(disk, folder, manifest)


def _cut(parts: Sequence[Part], layout: Layout) -> Iterator[Tensor]:
    """The pieces of ``layout``. One part is in memory at a time."""
    by_part = itertools.groupby(layout.pieces(0), key=lambda piece: piece.entry.start)
    for part, (start, pieces) in zip(parts, by_part, strict=True):
        values = part.read().reshape(-1)
        yield from (values[piece.start - start : piece.stop - start] for piece in pieces)


def _files(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Parts of one file each: as many as 4 GiB hold, and at least one."""
    own: list[Part] = []
    for part in parts:
        if own and sum(map(_num_bytes, [*own, part])) > _FILE_BYTES:
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
    return 4 * math.prod(part.sizes)
