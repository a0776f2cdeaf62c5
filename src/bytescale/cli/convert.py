"""``bytescale convert``: a checkpoint of ours becomes a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bytescale.cli.options import parse
from bytescale.common.errors import ConfigError, problem
from bytescale.common.units import GIBI, format_bytes
from bytescale.config import load_config


@dataclass(slots=True, kw_only=True)
class ConvertOptions:
    """Turn a checkpoint into a Hugging Face folder: bytescale convert runs/NAME/checkpoints/step-000050 FOLDER.

    The other way needs no conversion: bytescale train CONFIG.toml --init hf:FOLDER.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A folder checkpoints/step-*."""
    folder: Annotated[Path, tyro.conf.Positional]
    """What to write; it must not exist."""
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Of the weights written."""
    shard_bytes: int = 5 * GIBI
    """Largest safetensors file."""


def run(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    options = parse(ConvertOptions, arguments, prog="bytescale convert")
    if (options.checkpoint / "config.json").is_file():
        raise ConfigError(
            problem(
                f"{options.checkpoint} is a Hugging Face folder",
                so="there is nothing to convert",
                fix=f"train from it directly: bytescale train CONFIG.toml --init hf:{options.checkpoint}",
            )
        )
    from bytescale.train.export import export_checkpoint

    config = options.checkpoint.resolve().parent.parent / "config.toml"
    shards = export_checkpoint(
        options.checkpoint,
        options.folder,
        dtype=options.dtype,
        shard_bytes=options.shard_bytes,
        run_config=load_config(config) if config.is_file() else None,
    )
    size = sum(shard.stat().st_size for shard in shards)
    print(f"wrote {options.folder}: {len(shards)} safetensors files, {format_bytes(size)}, and config.json")
    print(f"load it with transformers: AutoModelForCausalLM.from_pretrained({str(options.folder)!r})")
    return 0
