"""Checkpoints of attached models as Hugging Face folders, and the other way round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bytescale.checkpoint.hugging_face import add_companions, appearing, write_imported
from bytescale.checkpoint.reading import CheckpointReader
from bytescale.checkpoint.writing import Part
from bytescale.common.errors import CheckpointError
from bytescale.config import HF_PREFIX, AttachedArchitecture, Config
from bytescale.hf.files.folder import constants_of, load_model, make_model, parameters_of, save_folder, set_constants
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

    config.json is the one that the run began with, with the dtype of the weights that are written. What was not trained
    is read from the folder that the run began with. Adapters are merged; as they are, they lie in ``adapter/``.
    """
    stored, target_dtype = CheckpointReader(checkpoint), DTYPES[dtype]
    architecture = AttachedArchitecture.of_dict(stored.state.architecture)
    if architecture.trained:
        model = load_model(_base_of(run_config), architecture.content, torch.float32)
        wrapped: Any = train_a_part(model, architecture.trained, seed=0)
    else:
        held = {name.removeprefix("master.") for name in stored.shapes() if name.startswith("master.")}
        if lost := sorted(held - parameters_of(architecture.content).keys()):
            raise CheckpointError(
                f"{checkpoint} has {lost[0]}, for which its model has no place",
                so="it would be lost",
                fix="set tie_word_embeddings to false in the model's config.json, and train it anew",
            )
        model = make_model(architecture.content, target_dtype)
        set_constants(model, architecture.buffers)
    with torch.no_grad(), appearing(target) as hidden:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(stored.read(f"master.{name}"))
        if "lora" in architecture.trained:
            wrapped.save_pretrained(hidden / "adapter")
            model = wrapped.merge_and_unload()
        if architecture.trained:
            model = model.to(target_dtype)
        shards = save_folder(model, hidden, architecture.content, dtype=target_dtype, shard_bytes=shard_bytes)
        add_companions(stored, hidden, run_config)
    return [target / shard.name for shard in shards]


def _base_of(run_config: Config | None) -> Path:
    """The folder of the model that a run began with."""
    preset = "" if run_config is None else run_config.model.preset
    base = Path(preset.removeprefix(HF_PREFIX)).expanduser()
    if not (base / "config.json").is_file():
        raise CheckpointError(
            f"the checkpoint has what was trained alone, and the model that it belongs to is not there "
            f"({preset or 'the run folder has no config.toml'})",
            so="there is nothing to put it into",
            fix="bring that folder back, or name its new place as model.preset in the run's config.toml",
        )
    return base


def import_attached(source: Path, target: Path, architecture: AttachedArchitecture) -> int:
    """``checkpoint.hugging_face.import_folder`` for an attached model. Returns the number of weights."""
    with appearing(target) as hidden:
        model = load_model(source, architecture.content, torch.float32)
        described = replace(architecture, buffers=constants_of(model)).as_dict()
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        parts = [
            Part(
                name=name,
                shape=tuple(value.shape),
                offsets=(0,) * value.dim(),
                sizes=tuple(value.shape),
                read=lambda value=value: value,  # type: ignore[misc]
            )
            for name, value in weights.items()
        ]
        write_imported(hidden, source, described, parts)
    return sum(value.numel() for value in weights.values())
