"""Hugging Face folders on disk: safetensors shards with their index, read and written tensor by tensor.

What our own parameters are called there is a mapping of names alone (``hf_tensors``).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bytescale.common.errors import CheckpointError, ConfigError
from bytescale.common.parsing import parse_json, read_input
from bytescale.config.foreign_config import file_inside, refuse_links_out

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
_SAMPLED = 2**20
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHAPE = "in training, --init takes the model's shape from the folder, and trainer.init alone its weights"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_EXPERT_PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def hf_tensors(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield what Hugging Face's files have of our parameters: names there, and views of the parameters.

    Llama's tensors map one to one. Each expert of Mixtral is a tensor of its own there, and a slice of a parameter
    here; experts come in the order of their numbers.
    """
    for name, value in parameters:
        if ".mlp.experts." in name:
            layer, part = name.split(".mlp.experts.")
            for expert, own in enumerate(value):
                yield f"model.{layer}.block_sparse_moe.experts.{expert}.{_EXPERT_PARTS[part]}.weight", own
        else:
            hf_name = name if name == _HEAD else f"model.{name}"
            yield hf_name.replace(".mlp.router.", ".block_sparse_moe.gate."), value


class FolderWeights:
    """The weights of a folder that has all tensors that a model expects and no others. Files are memory-mapped."""

    def __init__(self, folder: Path, expected: Iterable[tuple[str, Tensor]]) -> None:
        """``expected``: of ``hf_tensors``, which may be on the meta device. Reads headers only.

        Raises:
            ConfigError: if the folder has no weights that can be read.
            CheckpointError: if tensors are missing, have another shape or no place; the message names them.
        """
        self._folder = folder
        self._stored = stored_tensors(folder)
        self._open = cache(partial(safe_open, framework="pt"))
        shapes = {name: tuple(tensor.shape) for name, tensor in expected}
        missing = [name for name in shapes if name not in self._stored]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {len(shapes)} tensors: {some(missing)}",
                so="these weights would be random numbers",
                fix=f"download or save the model again, or use the config.json that belongs to it ({_SHAPE})",
            )
        self._refuse_others(sorted(self._stored.keys() - shapes.keys()))
        found = {name: self._stored[name].shape for name in shapes}
        wrong = [
            f"{name} {_times(found[name])} instead of {_times(shape)}"
            for name, shape in shapes.items()
            if found[name] != shape
        ]
        if wrong:
            raise CheckpointError(
                f"{folder} has tensors of other shapes than its model: {some(wrong)}",
                so="they do not fit",
                fix="use the config.json that belongs to these weights",
            )

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """A tensor, or a rectangle of it. Raises ``CheckpointError`` if it has NaN or infinity."""
        return finite(self._open(self._stored[name].file).get_slice(name)[part], name, self._folder)

    def _refuse_others(self, names: list[str]) -> None:
        """Raise ``CheckpointError`` for tensors that our models have no place for.

        Tables of rotary angles are constants. A head beside tied embeddings is allowed if it equals them: transformers
        takes the head of the file where they differ.
        """
        unknown = [name for name in names if not name.endswith("rotary_emb.inv_freq")]
        tied = unknown == [_HEAD]
        if unknown and not (tied and torch.equal(self.read(_HEAD), self.read(_EMBEDDING))):
            raise CheckpointError(
                f"{self._folder} has {len(unknown)} tensors that the model has no place for: {some(unknown)}",
                so="without them the model would compute something else",
                fix="set tie_word_embeddings to false in config.json: the head differs from the embedding"
                if tied
                else f"use the config.json that belongs to these weights ({_SHAPE})",
            )


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


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], *, shard_bytes: int) -> None:
    """Write shards of at most ``shard_bytes``, and an index if there are several.

    A shard holds at least one tensor, however large. At most one shard is in memory at a time.
    """
    shards: list[dict[str, int]] = []  # the bytes of the tensors of each, by name
    held: dict[str, Tensor] = {}

    def write() -> None:
        save_file(held, folder / str(len(shards)), metadata={"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in held.items()})
        held.clear()

    for name, tensor in weights:
        if held and sum(own.nbytes for own in held.values()) + tensor.nbytes > shard_bytes:
            write()
        held[name] = tensor
    write()
    total = len(shards)
    files = [SINGLE] if total == 1 else [f"model-{n + 1:05d}-of-{total:05d}.safetensors" for n in range(total)]
    for number, file in enumerate(files):
        (folder / str(number)).rename(folder / file)
    if total > 1:
        weight_map = {name: file for file, own in zip(files, shards, strict=True) for name in own}
        metadata = {"total_size": sum(sum(own.values()) for own in shards)}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def weights_fingerprint(folder: Path) -> str:
    """32 hex digits of the names, sizes, headers and first and last numbers of a folder's files of weights.

    Whoever does not have the files cannot know it, and training changes it. Raises as ``stored_tensors``.
    """
    content = xxhash.xxh3_128()
    for path in sorted(_files(folder)):
        with path.open("rb") as file:
            size = file.seek(0, 2)
            content.update(f"{path.name} {size} ".encode())
            for start in (0, size // 2, max(0, size - _SAMPLED)):
                file.seek(start)
                content.update(file.read(_SAMPLED))
    return content.hexdigest()


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer and the generation settings. Returns the names of the files that were found.

    Raises ``ConfigError`` for links out of ``source``.
    """
    refuse_links_out(source)
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
            named = parse_json(read_input(index))["weight_map"].values()
            paths = [file_inside(folder, name) for name in dict.fromkeys(named)]
            for path in paths:
                if path.exists() and not path.is_file():
                    raise ValueError(f"{path.name} is no regular file")
            return paths
        if single.is_file():
            return [single]
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as raised:
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


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
