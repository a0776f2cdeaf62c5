"""Weights to start from, a Hugging Face folder's or a checkpoint's: every rank reads what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bytescale.checkpoint.reading import CheckpointReader, check_same_model, load_states
from bytescale.common.errors import ConfigError
from bytescale.config import CHECKPOINT_PREFIX, HF_PREFIX, Architecture, Config, resolve_model
from bytescale.models import build_model
from bytescale.models.hf import HFTensor, pieces_of
from bytescale.models.hf_folder import check_pieces, read_pieces
from bytescale.runtime import ShardedOptimizer
from bytescale.runtime.optimizer.flat import Entry
from bytescale.runtime.optimizer.zero import ZeroShards
from bytescale.storage.place import Place, place_at


def check_initial_weights(config: Config) -> None:
    """Raise what loading would raise, from the files' headers alone; nothing to do for random weights."""
    source = config.trainer.init
    if source.startswith(CHECKPOINT_PREFIX):
        _check_checkpoint(source, resolve_model(config.model).as_dict())
    elif source:
        shape = resolve_model(config.model)
        if isinstance(shape, Architecture):
            check_pieces(folder_of(source), architecture_pieces(shape))


def load_initial_weights(
    source: str,
    architecture: Architecture,
    optimizer: ShardedOptimizer,
    group: dist.ProcessGroup,
) -> None:
    """Fill parameters, and master weights in their full precision, from the tensors of which this rank has a part.

    Args:
        source: ``hf:FOLDER``, or ``checkpoint:FOLDER`` for the weights of a checkpoint of ours, of any mesh.
        group: of all ranks, for messages between hosts.

    Raises:
        ConfigError: ``source`` is neither, or there are no weights in it.
        CheckpointError: tensors are missing or of other shapes; none was loaded.
    """
    if source.startswith(CHECKPOINT_PREFIX):
        load_master_weights(source, architecture.as_dict(), optimizer, group)
        return
    entries: dict[str, list[tuple[ZeroShards, Entry]]] = {}  # several, of experts in parallel
    for zero in optimizer.zeros:
        for entry in zero.parameters.entries:
            entries.setdefault(entry.name, []).append((zero, entry))
    masters = {zero: optimizer.states(zero)["master"] for zero in optimizer.zeros}
    pieces = [piece for piece in architecture_pieces(architecture) if piece.name in entries]
    for piece, tensor in read_pieces(folder_of(source), pieces, whole_model=False):
        found, expert = entries[piece.name], piece.expert or 0
        zero, entry = found[expert * len(found) // found[0][1].cut.shape[0]]
        cut = entry.cut if piece.expert is None else entry.cut.of_row()
        flat = cut.of(tensor).flatten()
        start = entry.start + (expert - (entry.cut.start if len(found) > 1 else 0)) * len(flat)
        for own in masters[zero]:
            low, high = max(start, own.start), min(start + len(flat), own.start + len(own.values))
            if low < high:
                own.values[low - own.start : high - own.start] = flat[low - start : high - start].to(own.values)
    optimizer.finish_restore(0, {})


def load_master_weights(
    source: str, architecture: dict[str, Any], optimizer: ShardedOptimizer, group: dist.ProcessGroup
) -> None:
    """Fill both from ``checkpoint:FOLDER``. Raises ``CheckpointError`` if there is none, or one of another model."""
    folder = _check_checkpoint(source, architecture)
    load_states(folder, optimizer, architecture, group, only=["master"])
    optimizer.finish_restore(0, {})


def architecture_pieces(architecture: Architecture) -> list[HFTensor]:
    """List all tensors of a model without making the model."""
    with torch.device("meta"):
        return pieces_of(build_model(architecture))


def folder_of(source: str) -> Path:
    if not source.startswith(HF_PREFIX):
        raise ConfigError(
            f"trainer.init is {source!r}",
            fix=f"write {HF_PREFIX}FOLDER or {CHECKPOINT_PREFIX}FOLDER, or leave it empty for random weights",
        )
    return Path(source.removeprefix(HF_PREFIX)).expanduser()


def _check_checkpoint(source: str, architecture: dict[str, Any]) -> Place:
    """The folder or URL of ``checkpoint:...``, whose names and shapes were read and whose model is this one."""
    place = place_at(source.removeprefix(CHECKPOINT_PREFIX))
    check_same_model(place, CheckpointReader(place).state.architecture, architecture)
    return place
