"""Hugging Face folders on disk: what their files of weights hold, by their headers, and what belongs to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
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
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files that belong to a model and that training does not change."""
_SHOWN = 8
_SAMPLED = 2**20
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
    """Copy the tokenizer, the processor and the generation settings. Returns the names of the files that were found.

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
