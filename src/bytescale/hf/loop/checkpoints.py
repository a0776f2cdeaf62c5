"""Checkpoints of an ``HDP``, in the trainer's format."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bytescale.checkpoint.agree import together
from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.folder_of_run import complete_checkpoints
from bytescale.checkpoint.manifest import RunState, read_manifest, step_name, step_of
from bytescale.common.errors import CheckpointError, ConfigError
from bytescale.config.schema import CheckpointConfig
from bytescale.hf.loop.session import Session


def save(session: Session, folder: Path, extra: dict[str, Any], keep: int) -> Path:
    """``HDP.save``."""
    optimizer = session.sharded()
    checkpoints, ranks = _checkpoints(session, folder, keep)
    with together(ranks):
        found = complete_checkpoints(folder) if session.group.rank == 0 else []
        if found and step_of(found[-1].name) > optimizer.num_updates:
            raise CheckpointError(
                f"{folder} has {found[-1].name}, and this model has made {optimizer.num_updates} updates",
                so="the checkpoint of another run, or of a later time, would be kept in place of the new one",
                fix="save to another folder, or move the later checkpoints away",
            )
    state = RunState(
        step=optimizer.num_updates,
        sampler={"extra": extra},
        architecture=_architecture(session),
        mesh=asdict(session.mesh.shape),
    )
    checkpoints.save(state, optimizer)
    checkpoints.finish()
    return folder / step_name(state.step)


def load(session: Session, path: Path) -> dict[str, Any]:
    """``HDP.load``."""
    optimizer = session.sharded()
    optimizer.require_adopted()
    complete = complete_checkpoints(path)
    path = complete[-1] if complete else path
    checkpoints, _ = _checkpoints(session, path.parent, keep=2**31)
    state = read_manifest(path).state
    if "extra" not in state.sampler:
        raise CheckpointError(
            f"{path} was written by bytescale train, not by HDP.save()",
            so="its names are not those of this model",
            fix="convert it with bytescale convert, and load the folder with transformers",
        )
    checkpoints.restore(path, optimizer, _architecture(session))
    extra: dict[str, Any] = state.sampler["extra"]
    return extra


def _architecture(session: Session) -> dict[str, Any]:
    return {"model": type(session.model).__name__, "parameters": session.sharded().shapes()}


def _checkpoints(session: Session, folder: Path, keep: int) -> tuple[Checkpointer, dist.ProcessGroup]:
    """What writes and reads. Raises ``ConfigError`` without torch.distributed."""
    if not dist.is_initialized():
        raise ConfigError(
            "checkpoints are written by torch.distributed, which is not initialised",
            fix="call init_process_group() before HDP(), also for a single rank, or keep hdp.state()",
        )
    if session.checkpoint_group is None:
        group = session.group.group
        ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        session.checkpoint_group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return Checkpointer(folder, session.checkpoint_group, CheckpointConfig(keep=keep)), session.checkpoint_group
