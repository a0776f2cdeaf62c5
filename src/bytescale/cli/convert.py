"""``bytescale convert``: turns a checkpoint into a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bytescale.common.units import GIBI, format_bytes
from bytescale.config import CHECKPOINT_PREFIX, HF_PREFIX, AttachedArchitecture, Config, DataConfig, load_config


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

    def run(self) -> int:
        source = Path(self.source)
        shards = _exporter(self.source)(
            self.source,
            self.folder,
            dtype=self.dtype,
            shard_bytes=self.shard_bytes,
            run_config=_run_config(source, source.resolve().parent.parent / "config.toml"),
        )
        size = sum(shard.stat().st_size for shard in shards)
        print(f"wrote {self.folder}: {len(shards)} safetensors files, {format_bytes(size)}, and config.json")
        if (self.folder / "adapter").is_dir():
            print(f"the adapters are merged into it; as peft loads them, they lie in {self.folder / 'adapter'}")
        print(f"load it with transformers: AutoModelForCausalLM.from_pretrained({str(self.folder)!r})")
        return 0


def _exporter(checkpoint: str) -> Callable[..., list[Path]]:
    from bytescale.checkpoint.hugging_face import export_checkpoint
    from bytescale.checkpoint.reading import CheckpointReader

    if AttachedArchitecture.is_in(CheckpointReader(checkpoint).state.architecture):
        from bytescale.hf.files.folder import export_attached

        return export_attached
    return export_checkpoint


def _run_config(checkpoint: Path, path: Path) -> Config | None:
    """The run's settings. Their ``init`` is the run's copy of the folder that the weights came from, or that folder."""
    from bytescale.train.run_folder import origin_of

    config = load_config(path) if path.is_file() else None
    init = "" if config is None else config.trainer.init
    origin = origin_of(f"{CHECKPOINT_PREFIX}{checkpoint}") or origin_of(init)
    if origin is None and config is None:
        return None
    if origin is None and init:
        print(
            f"{init} is not there any more: no tokenizer is copied, and config.json has the numbers of the checkpoint"
        )
    # Without a run, no context length but the folder's own counts.
    known = config or Config(data=DataConfig(context_length=1))
    return replace(known, trainer=replace(known.trainer, init="" if origin is None else f"{HF_PREFIX}{origin}"))
