"""Checkpoints of ``HDP`` in the trainer's format: master weights and optimizer states, for any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytescale.checkpoint.agree import settle
from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.folder_of_run import complete_checkpoints
from bytescale.checkpoint.manifest import RunState, step_name, step_of
from bytescale.checkpoint.reading import read_run_state
from bytescale.common.errors import CheckpointError, ConfigError, problem
from bytescale.config import CheckpointConfig
from bytescale.runtime import RankGroup, ShardedAdamW, ShardedOptimizer


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
        if len(optimizer.zeros) > 1:
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
            "parameters": {entry.name: list(entry.shape) for entry in optimizer.zeros[0].parameters.entries},
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
        checkpoints.save(state, cast("ShardedAdamW", StoredOptimizer(self._optimizer, state.step > 0)))
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
        stored = StoredOptimizer(self._optimizer, state.step > 0, numbers=state.sampler["numbers"])
        checkpoints = self._checkpoints(path.parent, keep=2**31)
        checkpoints.restore(path, cast("ShardedAdamW", stored), self._architecture)
        extra: dict[str, Any] = state.sampler["extra"]
        return extra

    def _checkpoints(self, folder: Path, keep: int) -> Checkpointer:
        return Checkpointer(folder, self._participants, CheckpointConfig(background=False, keep=keep))


class StoredOptimizer:
    """A ``ShardedOptimizer`` as checkpoints see an optimizer (``ShardedAdamW``): states shard by shard.

    The optimizer's own states are cut where options of parameters change; here they are put together.
    """

    def __init__(self, optimizer: ShardedOptimizer, has_states: bool, numbers: dict[str, float] | None = None) -> None:
        """``has_states``: whether there is more than weights. ``numbers``: states that are single numbers."""
        self._optimizer = optimizer
        self._numbers = numbers or {}
        (zero,) = optimizer.zeros
        self.parameters, self.mesh, self.hdp, self.tied_head = zero.parameters, zero.mesh, zero.hdp, None
        if has_states:
            optimizer.require_states()
        self._states: dict[str, list[Tensor]] = {}
        for name, pieces in optimizer.state_pieces().items():
            if name != "master" and not has_states:
                continue
            shards = [torch.zeros_like(shard.master) for shard in zero.shards]
            for number, own, values in pieces:
                shards[number][own] = values
            self._states[name] = shards

    def states(self) -> dict[str, list[Tensor]]:
        """Return one tensor per shard, by name. They may be filled; ``restore`` then hands them to the optimizer."""
        return self._states

    def restore(self, num_updates: int) -> None:
        """Take over what ``states`` hold, and give the weights to all ranks."""
        for name, pieces in self._optimizer.state_pieces().items():
            for number, own, values in pieces:
                if name in self._states:
                    values.copy_(self._states[name][number][own])
        self._optimizer.finish_restore(num_updates, self._numbers)
