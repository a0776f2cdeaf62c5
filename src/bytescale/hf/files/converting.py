"""Checkpoints of attached models as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bytescale.checkpoint.hugging_face import add_companions, appearing
from bytescale.checkpoint.reading import CheckpointReader
from bytescale.common.errors import CheckpointError
from bytescale.config import HF_PREFIX, AttachedArchitecture, Config
from bytescale.hf.files.folder import load_model, parameters_of, save_folder, write_folder
from bytescale.hf.files.partly_trained import train_a_part
from bytescale.runtime import DTYPES
from bytescale.storage.place import Place


def export_attached(
    checkpoint: Place,
    target: Path,
    *,
    dtype: str = "fp32",
    shard_bytes: int = 5 * 2**30,
    run_config: Config | None = None,
) -> list[Path]:
    """``checkpoint.hugging_face.export_checkpoint`` for an attached model. The process holds the whole model once.

    config.json is the one that the run began with, with the dtype of the weights that are written.
    """
    stored = CheckpointReader(checkpoint)
    architecture = AttachedArchitecture.of_dict(stored.state.architecture)
    if architecture.trained:
        return _export_with_base(stored, target, architecture, dtype, shard_bytes, run_config)
    held = {name.removeprefix("master.") for name in stored.shapes() if name.startswith("master.")}
    if lost := sorted(held - parameters_of(architecture.content).keys()):
        so, fix = "it would be lost", "set tie_word_embeddings to false in the model's config.json, and train it anew"
        raise CheckpointError(f"{checkpoint} has {lost[0]}, for which its model has no place", so=so, fix=fix)
    with appearing(target) as hidden:
        shards = write_folder(
            hidden,
            architecture.content,
            architecture.buffers,
            lambda name: stored.read(f"master.{name}"),
            dtype=DTYPES[dtype],
            shard_bytes=shard_bytes,
        )
        add_companions(stored, hidden, run_config)
    return [target / shard.name for shard in shards]


def _export_with_base(
    stored: CheckpointReader,
    target: Path,
    architecture: AttachedArchitecture,
    dtype: str,
    shard_bytes: int,
    run_config: Config | None,
) -> list[Path]:
    """The same where only a part was trained. Adapters are merged; as they are, they lie in the folder's ``adapter/``.

    What was not trained is read from the folder that the run began with.
    """
    preset = "" if run_config is None else run_config.model.preset
    base = Path(preset.removeprefix(HF_PREFIX)).expanduser()
    if not (base / "config.json").is_file():
        raise CheckpointError(
            f"the checkpoint has what was trained alone, and the model that it belongs to is not there "
            f"({preset or 'the run folder has no config.toml'})",
            so="there is nothing to put it into",
            fix="bring that folder back, or name its new place as model.preset in the run's config.toml",
        )
    model = load_model(base, architecture.content, torch.float32)
    wrapped: Any = train_a_part(model, architecture.trained, seed=0)
    with torch.no_grad(), appearing(target) as hidden:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(stored.read(f"master.{name}"))
        if "lora" in architecture.trained:
            wrapped.save_pretrained(hidden / "adapter")
            model = wrapped.merge_and_unload()
        shards = save_folder(
            model.to(DTYPES[dtype]), hidden, architecture.content, dtype=DTYPES[dtype], shard_bytes=shard_bytes
        )
        add_companions(stored, hidden, run_config)
    return [target / shard.name for shard in shards]
