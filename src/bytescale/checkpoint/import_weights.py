"""A Hugging Face folder as a checkpoint of ours, from which runs on any mesh can start."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from bytescale.checkpoint.disk import Disk
from bytescale.checkpoint.initial_weights import architecture_pieces
from bytescale.checkpoint.manifest import RunState
from bytescale.checkpoint.whole import Part, write_whole
from bytescale.common.errors import ConfigError, problem
from bytescale.config.hugging_face import architecture_of_folder
from bytescale.models.hf import HFTensor
from bytescale.models.hf_folder import check_pieces, copy_companions, finite


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
    parts = [_part(piece, file, pieces) for file, own in check_pieces(source, pieces).items() for piece in own]
    disk = Disk()
    hidden = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    try:
        companions = copy_companions(source, hidden)
        shutil.copyfile(source / "config.json", hidden / "config.json")
        state = RunState(step=0, sampler={}, architecture=architecture.as_dict(), mesh={})
        write_whole(disk, hidden, state, ["master"], parts, [*companions, "config.json"])
        disk.rename(hidden, target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return sum(torch.Size(piece.shape).numel() for piece in pieces)


def _part(piece: HFTensor, file: Path, pieces: list[HFTensor]) -> Part:
    """A tensor of a file, which is a parameter or one expert of it."""

    def read(_: str) -> Tensor:
        with safe_open(file, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(piece.hf_name)
        return finite(tensor, piece.hf_name, file.parent).to(torch.float32)

    zeros = (0,) * len(piece.shape)
    if piece.expert is None:
        return Part(
            name=piece.name, shape=piece.shape, offsets=zeros, sizes=piece.shape, dtype=torch.float32, read=read
        )
    experts = sum(other.name == piece.name for other in pieces)
    return Part(
        name=piece.name,
        shape=(experts, *piece.shape),
        offsets=(piece.expert, *zeros),
        sizes=(1, *piece.shape),
        dtype=torch.float32,
        read=read,
    )
