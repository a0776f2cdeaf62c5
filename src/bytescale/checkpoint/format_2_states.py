"""Fills an optimizer's states from a checkpoint of format 2, in which PyTorch (DCP) keeps whole tensors by name.

A range of a flat buffer is a few rectangles of each tensor (``layout``), and DCP moves rectangles. Hence a checkpoint
of any mesh loads into any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from bytescale.checkpoint.format_2 import TensorPlanner, load_tensors
from bytescale.checkpoint.layout import boxes_of
from bytescale.runtime import ShardedAdamW


def load_states(
    path: Path, optimizer: ShardedAdamW, group: dist.ProcessGroup, *, only: Sequence[str] | None = None
) -> None:
    """Fill this rank's parts of the states, or ``only`` some of them. All ranks of ``group`` call it.

    Raises ``CheckpointError`` on every rank when a rank could not read what it needs.
    """
    own = optimizer.states()
    loaded = {
        name: [torch.zeros_like(values, device="cpu") for values in parts]
        for name, parts in own.items()
        if only is None or name in only
    }
    load_tensors(path, dict(stored_pieces(optimizer, loaded)), planner=PieceReader(), group=group)
    for name, parts in loaded.items():
        for values, read in zip(own[name], parts, strict=True):
            values.copy_(read)


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
                    StoredPieces(torch.Size(entry.cut.shape), {}),
                )
                rows = values.split([math.prod(sizes) for _, sizes in boxes])
                for where, row, (_, sizes) in zip(places, rows, boxes, strict=True):
                    of_parameter.pieces[where] = row.view(sizes)
    return stored


class StoredPieces:
    """Rectangles of one tensor that this rank has; speaks DCP's protocol for sharded objects."""

    def __init__(self, whole: torch.Size, pieces: dict[tuple[int, ...], Tensor]) -> None:
        """``pieces``: by their offsets in the whole tensor."""
        self.whole = whole
        self.pieces = pieces

    def size(self) -> torch.Size:
        """Return the size of the whole tensor."""
        return self.whole

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(place), sizes=piece.shape) for place, piece in self.pieces.items()
        ]

    def at(self, index: MetadataIndex) -> Tensor:
        """The piece that DCP names."""
        assert index.offset is not None, "a piece is named by its place"
        return self.pieces[tuple(index.offset)]


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
