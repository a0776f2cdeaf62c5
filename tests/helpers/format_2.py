"""Writes checkpoints of format 2 through PyTorch (DCP), as bytescale 0.1 did: for tests and benchmarks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from bytescale.checkpoint.format_2_states import StoredPieces, stored_pieces
from bytescale.checkpoint.manifest import RunState
from bytescale.checkpoint.restoring import StoredTensors
from bytescale.runtime import ShardedAdamW


def host_copies(optimizer: ShardedAdamW) -> dict[str, list[Tensor]]:
    """This rank's parts of each state in host memory: training may go on while they are written."""
    return {
        name: [tensor.detach().to("cpu", copy=True) for tensor in parts] for name, parts in optimizer.states().items()
    }


def written_pieces(optimizer: ShardedAdamW, states: Mapping[str, Sequence[Tensor]]) -> dict[str, WrittenPieces]:
    """What DCP is given to write: the pieces that the reader asks for, where no other rank writes the same."""
    replicas = {entry.name: entry.cut.replica for entry in optimizer.parameters.entries}
    return {
        name: WrittenPieces(stored.whole, stored.pieces, is_writer=replicas[name.partition(".")[2]] == 0)
        for name, stored in stored_pieces(optimizer, states).items()
    }


class WrittenPieces(StoredPieces):
    """Rectangles of one tensor that this rank may have to write."""

    def __init__(self, whole: torch.Size, pieces: dict[tuple[int, ...], Tensor], *, is_writer: bool) -> None:
        """``pieces``: by their offsets in the whole tensor. ``is_writer``: no other rank writes the same."""
        super().__init__(whole, pieces)
        self.is_writer = is_writer

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        if not self.is_writer:
            return []
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(place)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(self.pieces[place]), size=self.whole
                ),
            )
            for place, chunk in zip(self.pieces, self.__create_chunk_list__(), strict=True)
        ]


class PieceWriter(DefaultSavePlanner):
    """Finds ``StoredPieces`` where DCP's own planner looks for tensors."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        stored: StoredPieces = self.state_dict[index.fqn]
        return stored.at(index)


def write_format_2(folder: Path, state: RunState, optimizer: ShardedAdamW, group: dist.ProcessGroup | None) -> None:
    """A whole checkpoint; all ranks of ``group`` call it."""
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save(
        written_pieces(optimizer, host_copies(optimizer)),
        checkpoint_id=str(folder),
        planner=PieceWriter(),
        process_group=group,
        no_dist=group is None,
    )
    if group is None or group.rank() == 0:
        content = asdict(state) | {"format": 2}
        (folder / "run_state.json").write_text(json.dumps(content), encoding="utf-8")


def downgrade(folder: Path) -> None:
    """Write a checkpoint of format 3 again in format 2, in its place, from one process."""
    stored = StoredTensors(folder)
    tensors = {
        name: WrittenPieces(torch.Size(shape), {(0,) * len(shape): stored.read(name)}, is_writer=True)
        for name, shape in stored.shapes().items()
    }
    old = folder.with_name(f"{folder.name}-old")
    dcp.save(dict(tensors), checkpoint_id=str(old), planner=PieceWriter(), no_dist=True)
    content = asdict(stored.state) | {"format": 2}
    (old / "run_state.json").write_text(json.dumps(content), encoding="utf-8")
    shutil.rmtree(folder)
    old.rename(folder)
