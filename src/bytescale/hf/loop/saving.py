"""Checkpoints of ``HDP`` in the trainer's format: master weights and optimizer states, for any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from bytescale.checkpoint.agree import settle
from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.folder_of_run import complete_checkpoints
from bytescale.checkpoint.manifest import RunState, step_name, step_of
from bytescale.checkpoint.reading import read_run_state
from bytescale.common.errors import CheckpointError, ConfigError, problem
from bytescale.config import CheckpointConfig
from bytescale.runtime import RankGroup, ShardedOptimizer


@dataclass(frozen=True)
class _Participants:
    """The ranks that write and read together (``checkpoint.Participants``)."""

    is_first: bool
    checkpoint_group: dist.ProcessGroup


class Savings:
    """Saves and restores the optimizer of one ``HDP``. Every method is called by every rank."""

    def __init__(self, group: RankGroup, optimizer: ShardedOptimizer, model: nn.Module) -> None:
        """Raises ``ConfigError`` where torch.distributed is not initialised, or parameters have several dtypes."""
        if not dist.is_initialized():
            raise ConfigError(
                problem(
                    "checkpoints are written by torch.distributed, which is not initialised",
                    fix="call init_process_group() before HDP(), also for a single rank, or keep hdp.state()",
                )
            )
        if len({zero.parameters.values.dtype for zero in optimizer.zeros}) > 1:
            raise ConfigError(
                problem(
                    "the trained parameters have several dtypes",
                    so="a checkpoint holds weights of one dtype",
                    fix="cast them to one dtype before hdp.adamw(), or keep hdp.state()",
                )
            )
        ranks = None if group.group is None else dist.get_process_group_ranks(group.group)
        made = dist.new_group(ranks or [dist.get_rank()], backend="gloo", use_local_synchronization=True)
        self._participants = _Participants(group.rank == 0, made)
        self._optimizer = optimizer
        self._group = group
        self._architecture = {
            "model": type(model).__name__,
            "parameters": {entry.name: list(entry.shape) for _, entry in optimizer.all_entries()},
        }

    def save(self, folder: Path, extra: dict[str, Any], keep: int) -> Path:
        """Write ``folder/step-<updates>`` and return its path. ``extra`` is the caller's, as in ``HDP.save``."""
        state = RunState(
            step=self._optimizer.num_updates,
            sampler={"extra": extra, "numbers": self._optimizer.state_numbers()},
            architecture=self._architecture,
            mesh={"hdp": self._group.size},
        )
        self._refuse_later(folder, state.step)
        checkpoints = self._checkpoints(folder, keep)
        checkpoints.save(state, self._optimizer)
        checkpoints.finish()
        return folder / step_name(state.step)

    def _refuse_later(self, folder: Path, step: int) -> None:
        """Raise ``CheckpointError`` if a later checkpoint is there: it would outlive the new one, and be loaded."""
        error, found = None, complete_checkpoints(folder) if self._participants.is_first else []
        if found and step_of(found[-1].name) > step:
            error = CheckpointError(
                problem(
                    f"{folder} has {found[-1].name}, and this model has made {step} updates",
                    so="the checkpoint of another run, or of a later time, would be kept in place of the new one",
                    fix="save to another folder, or move the later checkpoints away",
                )
            )
        settle(error, self._participants.checkpoint_group)

    def load(self, path: Path) -> dict[str, Any]:
        """Continue from a checkpoint, or from the newest one in a folder of them. Returns the caller's ``extra``."""
        self._optimizer.require_adopted()
        complete = complete_checkpoints(path)
        path = complete[-1] if complete else path
        state = read_run_state(path)
        if "numbers" not in state.sampler:
            raise CheckpointError(
                problem(
                    f"{path} was written by bytescale train, not by HDP.save()",
                    so="its names are not those of this model",
                    fix="convert it with bytescale convert, and load the folder with transformers",
                )
            )
        checkpoints = self._checkpoints(path.parent, keep=2**31)
        checkpoints.restore(path, self._optimizer, self._architecture, numbers=state.sampler["numbers"])
        extra: dict[str, Any] = state.sampler["extra"]
        return extra

    def _checkpoints(self, folder: Path, keep: int) -> Checkpointer:
        return Checkpointer(folder, self._participants, CheckpointConfig(background=False, keep=keep))
