"""``bytescale convert``: turns a checkpoint into a Hugging Face folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bytescale.common.errors import typed_path
from bytescale.common.parsing import parse_json, read_input
from bytescale.common.units import GIBI, format_bytes
from bytescale.config.foreign_config import refuse_links_out
from bytescale.config.load import load_config


@dataclass(slots=True, kw_only=True)
class ConvertOptions:
    """Turn a checkpoint into a Hugging Face folder: bytescale convert runs/NAME/checkpoints/step-000050 FOLDER."""

    source: Annotated[str, tyro.conf.Positional]
    """A checkpoint (checkpoints/step-*), or its URL."""
    folder: Annotated[Path, tyro.conf.Positional]
    """The folder to write. It must not exist yet."""
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    """The dtype of the weights that are written. Checkpoints have fp32."""
    shard_bytes: int = 5 * GIBI
    """Largest size of a safetensors file, in bytes."""

    base: str = ""
    """Of a run that trained a part of a model (adapters, or with frozen weights): the folder of that model, or its name
    on the Hub. Empty: the one that the run names, if its weights are those with which the run began."""

    def run(self) -> int:
        run = Path(os.path.realpath(typed_path(self.source))).parent.parent
        settings, origin = run / "config.toml", run / "origin"
        run_config = load_config(settings) if settings.is_file() else None
        refuse_links_out(origin, run)
        from bytescale.hf.files.export import export_checkpoint  # takes seconds to import
        from bytescale.hf.files.folder import auto_class

        export_checkpoint(
            self.source,
            self.folder,
            dtype=self.dtype,
            shard_bytes=self.shard_bytes,
            run_config=run_config,
            origin=origin if origin.is_dir() else None,
            base=self.base,
        )
        shards = list(self.folder.glob("*.safetensors"))
        size = sum(shard.stat().st_size for shard in shards)
        print(f"wrote {self.folder}: {len(shards)} safetensors files, {format_bytes(size)}, and config.json")
        if (self.folder / "adapter").is_dir():
            print(f"the adapters are merged into it; as peft loads them, they lie in {self.folder / 'adapter'}")
        if not (self.folder / "tokenizer.json").is_file():
            print(
                f"it has no tokenizer: {origin} has none, as of runs on .bin files alone, or of earlier versions. Copy "
                "the tokenizer's files into it yourself"
            )
        kind = auto_class(parse_json(read_input(self.folder / "config.json"))).__name__
        print(f"load it with transformers: {kind}.from_pretrained({str(self.folder)!r})")
        return 0
