"""Optimizer state as torch.distributed.checkpoint (DCP) stores it: whole tensors under the model's own names.

What a rank holds are some ranges of a flat buffer of its parts of its stage's parameters. In the checkpoint there is
none of that: ``master.layers.3.mlp.up_proj.weight`` and so on, in their full shapes. A range of a part is a few
rectangles of the whole tensor, and DCP moves rectangles: hence a checkpoint of any (tp, pp, hdp) and of any size of
buckets loads into any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from bytescale.checkpoint.format_2 import TensorPlanner
from bytescale.runtime import ShardedAdamW

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangle in a tensor."""


def host_copies(optimizer: ShardedAdamW) -> dict[str, list[Tensor]]:
    """This rank's parts of each state in host memory: training may go on while they are written."""
    return {
        name: [tensor.detach().to("cpu", copy=True) for tensor in parts] for name, parts in optimizer.states().items()
    }


def stored_pieces(optimizer: ShardedAdamW, states: Mapping[str, Sequence[Tensor]]) -> dict[str, StoredPieces]:
    """What DCP is given: by name, the pieces of every parameter that lie in ``states``, as views of them.

    ``states``: as of ``optimizer.states()``.
    """
    flat = optimizer.parameters
    stored: dict[str, StoredPieces] = {}
    for number, place in enumerate(flat.shards(optimizer.hdp.rank)):
        for piece in flat.pieces(place):
            entry = piece.entry
            offset = [0] * len(entry.shape)
            offset[entry.cut.dim] = entry.cut.start
            boxes = list(boxes_of(entry.shape, piece.start - entry.start, piece.stop - entry.start))
            places = [tuple(a + b for a, b in zip(offsets, offset, strict=True)) for offsets, _ in boxes]
            for state, parts in states.items():
                values = parts[number][piece.start - place.start : piece.stop - place.start]
                of_parameter = stored.setdefault(
                    f"{state}.{entry.name}",
                    StoredPieces(torch.Size(entry.cut.shape), {}, is_writer=entry.cut.replica == 0),
                )
                rows = values.split([math.prod(sizes) for _, sizes in boxes])
                for where, row, (_, sizes) in zip(places, rows, boxes, strict=True):
                    of_parameter.pieces[where] = row.view(sizes)
    return stored


def boxes_of(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """The elements ``low`` to ``high`` of a row-major tensor as rectangles, in order: at most 2 d - 1 of them."""
    if low >= high:
        return
    if len(shape) == 1:
        yield (low,), (high - low,)
        return
    row = math.prod(shape[1:])
    first, last = -(-low // row), high // row  # whole rows
    if first > last:  # all of it inside one row
        yield from _within_row(shape, last, low - last * row, high - last * row)
        return
    yield from _within_row(shape, first - 1, low - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _within_row(shape, last, 0, high - last * row)


def _within_row(shape: Sequence[int], row: int, low: int, high: int) -> Iterator[Box]:
    for offsets, sizes in boxes_of(shape[1:], low, high):
        yield (row, *offsets), (1, *sizes)


class StoredPieces:
    """Rectangles of one tensor that this rank has; speaks DCP's protocol for sharded objects."""

    def __init__(self, whole: torch.Size, pieces: dict[tuple[int, ...], Tensor], *, is_writer: bool) -> None:
        """``pieces``: by their offsets in the whole tensor. ``is_writer``: no other rank writes the same."""
        self.whole = whole
        self.pieces = pieces
        self.is_writer = is_writer

    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return self.whole

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

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(place), sizes=piece.shape) for place, piece in self.pieces.items()
        ]

    def at(self, index: MetadataIndex) -> Tensor:
        """The piece that DCP names."""
        assert index.offset is not None, "a piece is named by its place"
        return self.pieces[tuple(index.offset)]


class PieceWriter(DefaultSavePlanner):
    """Finds ``StoredPieces`` where DCP's own planner looks for tensors."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        stored: StoredPieces = self.state_dict[index.fqn]
        return stored.at(index)


class PieceReader(TensorPlanner):
    """Finds ``StoredPieces`` where DCP's own planner looks for tensors."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # DCP's own goes through the values and would drop what is neither tensor nor container (torch 2.13).
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator
        self.flatten_state_dict = False

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        stored: StoredPieces = self.state_dict[index.fqn]
        return stored.at(index)
