"""Weights to start from, a Hugging Face folder's or a checkpoint's: every rank reads what it holds."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bytescale.checkpoint.agree import together
from bytescale.checkpoint.layout import Box, intersection
from bytescale.checkpoint.reading import CheckpointReader, check_same_model, load_states, slices_in, wanted_by
from bytescale.config.architecture import Architecture
from bytescale.config.attached import AttachedArchitecture
from bytescale.config.resolve import CHECKPOINT_PREFIX, resolve_model, source_folder
from bytescale.config.schema import Config
from bytescale.models import build_model
from bytescale.models.hf_folder import FolderWeights, hf_tensors
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer


def check_initial_weights(config: Config) -> None:
    """Raise what loading would raise, from the files' headers alone; nothing to do for random weights."""
    source = config.trainer.init
    if not source:
        return
    shape = resolve_model(config.model)
    if source.startswith(CHECKPOINT_PREFIX):
        place = source.removeprefix(CHECKPOINT_PREFIX)
        check_same_model(place, CheckpointReader(place).state.architecture, shape.as_dict())
    elif isinstance(shape, Architecture):
        FolderWeights(source_folder(source), hf_tensors(parameters_of(shape).items()))


def load_initial_weights(
    source: str,
    architecture: Architecture | AttachedArchitecture,
    optimizer: ShardedOptimizer,
    group: dist.ProcessGroup,
) -> None:
    """Fill parameters, and master weights in their full precision: every rank reads its part of them.

    Args:
        source: ``hf:FOLDER`` of one of our own models, or ``checkpoint:FOLDER``, of any mesh.
        group: of all ranks, for messages between hosts.

    Raises on every rank:
        ConfigError: there are no weights in ``source``.
        CheckpointError: tensors are missing or of other shapes, or of another model.
    """
    if source.startswith(CHECKPOINT_PREFIX):
        place = source.removeprefix(CHECKPOINT_PREFIX)
        load_states(place, optimizer, architecture.as_dict(), group, only=["master"])
    else:
        assert isinstance(architecture, Architecture), "transformers loads its own models"
        with together(group):
            _fill(optimizer, source_folder(source), architecture)
    optimizer.finish_restore(0, {})


def _fill(optimizer: ShardedOptimizer, folder: Path, architecture: Architecture) -> None:
    parameters = parameters_of(architecture)
    weights = FolderWeights(folder, hf_tensors(parameters.items()))
    for wanted in (one for one in wanted_by(optimizer) if one.state == "master"):
        whole = parameters[wanted.parameter]
        for number, (name, stored) in enumerate(hf_tensors([(wanted.parameter, whole)])):
            first = (number,) * (whole.dim() - stored.dim())  # of an expert, which is a slice of the parameter
            box: Box = (*first, *(0 for _ in stored.shape)), (*(1 for _ in first), *stored.shape)
            shared = intersection(box, wanted.box)
            if shared is not None:
                part = weights.read(name, slices_in(shared, box)[len(first) :])
                wanted.target[slices_in(shared, wanted.box)].copy_(part)


def parameters_of(architecture: Architecture) -> dict[str, nn.Parameter]:
    """All parameters of a model by name, without memory for them."""
    with torch.device("meta"):
        return dict(build_model(architecture).named_parameters())
