"""Hugging Face folders on disk: safetensors shards with their index, read and written tensor by tensor."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bytescale.common.errors import CheckpointError, ConfigError
from bytescale.common.parsing import parse_json
from bytescale.models.hf import HFTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Files that belong to a model and that training does not change."""
_SHOWN = 8
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHAPE = "in training, --init takes the model's shape from the folder, and trainer.init alone its weights"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def check_pieces(folder: Path, pieces: Sequence[HFTensor], *, whole_model: bool = True) -> dict[Path, list[HFTensor]]:
    """Find out which file holds which pieces, and check their shapes. Reads headers only.

    ``whole_model``: ``pieces`` are all that the model has, so that the folder may not have others.

    Raises:
        ConfigError: if the folder has no weights that can be read.
        CheckpointError: if tensors are missing, have another shape or no place; the message names them.
    """
    stored = stored_tensors(folder)
    missing = [piece.hf_name for piece in pieces if piece.hf_name not in stored]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(pieces)} tensors: {_some(missing)}",
            so="these weights would be random numbers",
            fix=f"download or save the model again, or use the config.json that belongs to it ({_SHAPE})",
        )
    if whole_model:
        _refuse_others(folder, stored.keys() - {piece.hf_name for piece in pieces}, stored)
    by_file: dict[Path, list[HFTensor]] = {}
    wrong = []
    for piece in pieces:
        found = stored[piece.hf_name]
        by_file.setdefault(found.file, []).append(piece)
        if found.shape != piece.shape:
            wrong.append(f"{piece.hf_name} {_times(found.shape)} instead of {_times(piece.shape)}")
    if wrong:
        raise CheckpointError(
            f"{folder} has tensors of other shapes than its model: {_some(wrong)}",
            so="they do not fit",
            fix="use the config.json that belongs to these weights",
        )
    return by_file


def read_pieces(
    folder: Path, pieces: Sequence[HFTensor], *, whole_model: bool = True
) -> Iterator[tuple[HFTensor, Tensor]]:
    """Yield every piece with its tensor, file by file. Files are memory-mapped: one tensor at a time is in memory.

    Raises the errors of ``check_pieces``, before anything is read.
    """
    for file, own in check_pieces(folder, pieces, whole_model=whole_model).items():
        with safe_open(file, framework="pt") as tensors:
            for piece in own:
                yield piece, finite(tensors.get_tensor(piece.hf_name), piece.hf_name, folder)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What the header of a file says about a tensor. ``dtype``: as safetensors writes it, such as ``BF16``."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def exact_dtype(folder: Path, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the weights of a folder are read for parameters of ``dtype``, so that none is rounded.

    It is that of the files where all have ``dtype``: then they are mapped into memory and not copied. Else it is
    FP32, or FP64 for parameters in FP64. Raises as ``stored_tensors``.
    """
    stored = {_FLOATS[tensor.dtype] for tensor in stored_tensors(folder).values() if tensor.dtype in _FLOATS}
    return dtype if stored == {dtype} else torch.promote_types(dtype, torch.float32)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all files, by name. Reads headers only.

    Raises:
        ConfigError: if there are no weights that can be read.
        CheckpointError: if a file is damaged, or has weights that are no floats: they are quantised.
    """
    stored = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    part = tensors.get_slice(name)
                    dtype = part.get_dtype()
                    if dtype not in _FLOATS and (name.endswith("weight") or dtype.startswith(("I8", "F8"))):
                        raise CheckpointError(
                            f"{name} in {file} has dtype {dtype}",
                            so="it is quantised, and without its scales the model would compute something else",
                            fix=f"save the model anew, in one of {', '.join(_FLOATS)}",
                        )
                    stored[name] = StoredTensor(file, tuple(part.get_shape()), dtype)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{file} cannot be read ({error})", so="it is cut short or damaged", fix="download it again"
            ) from error
    return stored


def finite(tensor: Tensor, name: str, folder: Path) -> Tensor:
    """The tensor itself. Raises ``CheckpointError`` if it has NaN or infinity."""
    if tensor.numel() and not all(extreme.isfinite() for extreme in tensor.detach().aminmax()):
        raise CheckpointError(
            f"{name} of {folder} has numbers that are not finite",
            so="every loss and score would be NaN",
            fix="download the model again, or convert an earlier checkpoint",
        )
    return tensor


def write_pieces(
    folder: Path,
    pieces: Sequence[HFTensor],
    value: Callable[[HFTensor], Tensor],
    *,
    dtype: torch.dtype,
    shard_bytes: int,
) -> list[Path]:
    """Write shards of at most ``shard_bytes``, and an index if there are several. Returns the paths of the shards.

    A shard holds at least one tensor, however large. ``value`` returns the tensor of a piece; at most one shard is in
    memory at a time.
    """
    shards: list[list[HFTensor]] = [[]]
    filled = 0
    for piece in pieces:
        size = math.prod(piece.shape) * dtype.itemsize
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(piece)
        filled += size
    total = len(shards)
    names = [SINGLE] if total == 1 else [f"model-{n + 1:05d}-of-{total:05d}.safetensors" for n in range(total)]
    for name, own in zip(names, shards, strict=True):
        tensors = {piece.hf_name: value(piece).to(dtype).reshape(piece.shape).clone() for piece in own}
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if total > 1:
        sizes = sum(math.prod(piece.shape) * dtype.itemsize for piece in pieces)
        weight_map = {piece.hf_name: name for name, own in zip(names, shards, strict=True) for piece in own}
        write_json(folder / INDEX, {"metadata": {"total_size": sizes}, "weight_map": weight_map})
    return [folder / name for name in names]


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer and the generation settings. Returns the names of the files that were found."""
    found = [name for name in COMPANIONS if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, target / name)
    return found


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with an indent of two spaces, as Hugging Face does."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _files(folder: Path) -> list[Path]:
    index, single = folder / INDEX, folder / SINGLE
    error: object = f"there is no {SINGLE}"
    try:
        if index.exists():
            named = parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / name for name in dict.fromkeys(named)]
        if single.exists():
            return [single]
    except (OSError, ValueError, KeyError, AttributeError) as raised:
        error = raised
    if list(folder.glob("pytorch_model*.bin")):
        raise ConfigError(
            f"{folder} has its weights in pytorch_model.bin only, which is a pickle",
            so="reading it could run code that somebody has put there",
            fix="save it as safetensors, with transformers: from_pretrained() and save_pretrained()",
        )
    raise ConfigError(
        f"{folder} has no weights that can be read ({error})",
        fix=f"name a folder with {SINGLE}, or with {INDEX} and the files that it names",
    )


def _refuse_others(folder: Path, others: set[str], stored: dict[str, StoredTensor]) -> None:
    """Raise ``CheckpointError`` for tensors that our models have no place for.

    Tables of rotary angles are constants. A head beside tied embeddings is allowed if it equals them: transformers
    takes the head of the file where they differ.
    """
    unknown = sorted(name for name in others if not name.endswith("rotary_emb.inv_freq"))
    tied = unknown == [_HEAD]
    if tied and _EMBEDDING in stored:
        files = stored[_HEAD].file, stored[_EMBEDDING].file
        with safe_open(files[0], framework="pt") as one, safe_open(files[1], framework="pt") as other:
            if torch.equal(one.get_tensor(_HEAD), other.get_tensor(_EMBEDDING)):
                return
    if unknown:
        raise CheckpointError(
            f"{folder} has {len(unknown)} tensors that the model has no place for: {_some(unknown)}",
            so="without them the model would compute something else",
            fix="set tie_word_embeddings to false in config.json: the head differs from the embedding"
            if tied
            else f"use the config.json that belongs to these weights ({_SHAPE})",
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
