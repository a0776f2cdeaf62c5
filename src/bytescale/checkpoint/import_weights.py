"""A Hugging Face folder as a checkpoint of ours, from which runs on any mesh can start."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from bytescale.checkpoint.checkpointer import STATE_FILE, RunState
from bytescale.checkpoint.initial_weights import architecture_pieces
from bytescale.checkpoint.pieces import PieceWriter, StoredPieces
from bytescale.common.errors import ConfigError, problem
from bytescale.config.hugging_face import architecture_of_folder
from bytescale.models.hf import Piece
from bytescale.models.hf_folder import check_pieces, copy_companions


def import_folder(source: Path, target: Path) -> int:
    """Write the checkpoint ``target`` with the weights in ``source`` as master weights in fp32, and nothing else.

    Tensors go from file to file one by one. ``target`` appears when it is complete; tokenizer and generation settings
    are copied into it.

    Returns:
        The number of weights.

    Raises:
        ConfigError: ``target`` exists, or ``source`` has no weights or a model that is not supported.
        CheckpointError: tensors are missing or of other shapes.
    """
    if target.exists():
        raise ConfigError(problem(f"{target} exists", so="it would be overwritten", fix="name a new folder"))
    architecture = architecture_of_folder(source)
    pieces = architecture_pieces(architecture)
    stored: dict[str, _FromFile] = {}
    for file, own in check_pieces(source, pieces).items():
        for piece in own:
            stored.setdefault(f"master.{piece.name}", _FromFile(_whole_shape(piece, pieces))).add(piece, file)
    hidden = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant
            dcp.save(dict(stored), checkpoint_id=str(hidden), planner=PieceWriter(), no_dist=True)
        copy_companions(source, hidden)
        shutil.copyfile(source / "config.json", hidden / "config.json")
        state = RunState(step=0, sampler={}, architecture=architecture.as_dict(), mesh={})
        (hidden / STATE_FILE).write_text(json.dumps(asdict(state)), encoding="utf-8")
        hidden.replace(target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return sum(torch.Size(piece.shape).numel() for piece in pieces)


class _FromFile(StoredPieces):
    """Pieces that are read when DCP comes to write them. On the meta device until then."""

    def __init__(self, whole: torch.Size) -> None:
        super().__init__(whole, {}, is_writer=True)
        self._places: dict[tuple[int, ...], tuple[Piece, Path]] = {}

    def add(self, piece: Piece, file: Path) -> None:
        """A tensor of a file, which is the parameter or one expert of it."""
        is_whole = piece.expert is None
        place = tuple([0] * len(self.whole)) if is_whole else (int(piece.expert or 0), *([0] * len(piece.shape)))
        shape = piece.shape if is_whole else (1, *piece.shape)
        self.pieces[place] = torch.empty(shape, dtype=torch.float32, device="meta")
        self._places[place] = piece, file

    def at(self, index: MetadataIndex) -> Tensor:
        place = tuple(index.offset or ())
        piece, file = self._places[place]
        with safe_open(file, framework="pt") as tensors:
            tensor: Any = tensors.get_tensor(piece.hf_name)
        return tensor.to(torch.float32).reshape(self.pieces[place].shape)


def _whole_shape(piece: Piece, pieces: list[Piece]) -> torch.Size:
    if piece.expert is None:
        return torch.Size(piece.shape)
    experts = sum(other.name == piece.name for other in pieces)
    return torch.Size((experts, *piece.shape))
