"""Hugging Face folders of checkpoints, whoever has written the model's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bytescale.checkpoint.hugging_face import export_checkpoint
from bytescale.checkpoint.reading import CheckpointReader
from bytescale.config import AttachedArchitecture
from bytescale.storage.place import Place, place_at


def export(checkpoint: str | Place, folder: Path, **settings: Any) -> list[Path]:
    """Write a folder for transformers. Arguments, result and errors as those of ``export_checkpoint``."""
    if AttachedArchitecture.is_in(CheckpointReader(checkpoint, companions=False).state.architecture):
        from bytescale.hf.files.folder import export_attached  # imports transformers

        return export_attached(place_at(checkpoint), folder, **settings)
    return export_checkpoint(checkpoint, folder, **settings)
