"""Checkpoints through torch.distributed.checkpoint (DCP): whole at any moment, loadable on any number of ranks.

Each rank's slices of master weights and Adam moments are written as a ``DTensor`` sharded over the flat buffer, whose
layout does not depend on the number of ranks; DCP reshards on load. A checkpoint is written into a hidden folder and
renamed when every rank's part is on disk: a folder named ``step-*`` is always complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from bytescale.common.errors import CheckpointError, problem
from bytescale.common.units import format_bytes
from bytescale.config import CheckpointConfig
from bytescale.runtime import ShardedAdamW
from bytescale.train.ranks import Ranks

_STATE_FILE = "run_state.json"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything but tensors that continuing exactly needs."""

    step: int  # optimizer updates done
    sampler: dict[str, Any]  # where the data order stands
    architecture: dict[str, Any]
    layout: list[dict[str, Any]]  # of the flat buffers
    num_ranks: int  # that wrote it; for people only


class Checkpointer:
    """Writes, prunes and restores the checkpoints of one run. Every method is called by every rank."""

    def __init__(self, folder: Path, ranks: Ranks, config: CheckpointConfig) -> None:
        self.folder = folder
        self.ranks = ranks
        self.config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bytescale-checkpoint")
        self._pending: tuple[Future[Any], Path, Path] | None = None
        if ranks.is_first and folder.exists():
            for leftover in folder.glob(".step-*.tmp"):  # of a run that was killed while writing
                shutil.rmtree(leftover)

    def save(self, state: RunState, optimizer: ShardedAdamW) -> None:
        """Write ``step-<n>``. In the background: tensors are copied now, files follow while training goes on."""
        self.finish()
        final = self.folder / f"step-{state.step:06d}"
        hidden = self.folder / f".step-{state.step:06d}.tmp"
        if self.ranks.is_first:
            shutil.rmtree(final, ignore_errors=True)  # a resumed run may pass the same step again
            hidden.mkdir(parents=True, exist_ok=True)
            (hidden / _STATE_FILE).write_text(json.dumps(asdict(state)), encoding="utf-8")
        torch.distributed.barrier(group=self.ranks.checkpoint_group)
        tensors = self._host_copies(optimizer)
        writing = self._thread.submit(
            dcp.save, tensors, checkpoint_id=str(hidden), process_group=self.ranks.checkpoint_group
        )
        self._pending = (writing, hidden, final)
        if not self.config.background:
            self.finish()

    def poll(self) -> None:
        """Publish a background checkpoint if its files are complete. Cheap; call once a step."""
        if self._pending is not None and self._pending[0].done():
            self._settle()

    def finish(self) -> None:
        """Wait until a checkpoint under way is published."""
        if self._pending is not None:
            self._settle()

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        complete = complete_checkpoints(self.folder)
        return complete[-1] if complete else None

    def restore(self, path: Path, optimizer: ShardedAdamW, *, expected: RunState) -> RunState:
        """Fill the optimizer and the parameters from ``path``; ``expected`` is this run's own description.

        Raises ``CheckpointError`` when the checkpoint is of another model.
        """
        state = read_run_state(path)
        _check_same_model(path, state, expected)
        tensors = self._host_copies(optimizer)
        dcp.load(tensors, checkpoint_id=str(path), process_group=self.ranks.checkpoint_group)
        for name, state_tensor in optimizer.states().items():
            loaded = tensors[name].to_local()
            state_tensor[: loaded.numel()].copy_(loaded)
        optimizer.restore(state.step)
        return state

    def _settle(self) -> None:
        assert self._pending is not None, "there is a checkpoint under way"
        future, hidden, final = self._pending
        self._pending = None
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # DCP's own is none of the first kind
            raise CheckpointError(
                problem(
                    f"the checkpoint {final.name} could not be written: {_reason(error, self.folder)}",
                    so="the checkpoints before it are whole",
                    fix=f"look at the disk that holds {self.folder}, then resume",
                )
            ) from error
        self._publish(hidden, final)

    def _publish(self, hidden: Path, final: Path) -> None:
        """The coordinator's save ends after every rank's: rank 0 alone gives the folder its name."""
        if not self.ranks.is_first:
            return
        hidden.replace(final)
        _sync_folder(self.folder)
        for old in complete_checkpoints(self.folder)[: -self.config.keep]:
            doomed = old.with_name(f".{old.name}.tmp")
            old.replace(doomed)  # renamed first: a half-deleted folder is never taken for a checkpoint
            shutil.rmtree(doomed)

    def _host_copies(self, optimizer: ShardedAdamW) -> dict[str, DTensor]:
        """This rank's slices, without the padding, copied to host memory as shards of flat ``[num_elements]`` tensors.

        A copy, because training goes on while it is written. (DCP's own stager would copy the whole storage that a
        slice is a view of.)
        """
        flat, hdp = optimizer.parameters, self.ranks.hdp
        size = min(max(flat.num_elements - hdp.rank * flat.shard_size, 0), flat.shard_size)
        mesh = DeviceMesh.from_group(self.ranks.checkpoint_group, "cpu")
        whole = torch.Size([flat.num_elements])
        return {
            name: DTensor.from_local(
                tensor.detach()[:size].to("cpu", copy=True), mesh, [Shard(0)], run_check=False, shape=whole, stride=(1,)
            )
            for name, tensor in optimizer.states().items()
        }


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if re.fullmatch(r"step-\d+", path.name))


def read_run_state(path: Path) -> RunState:
    """What a checkpoint says of itself."""
    try:
        return RunState(**json.loads((path / _STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise CheckpointError(
            problem(f"{path} is not a checkpoint of bytescale: {error}", fix="name a folder checkpoints/step-*")
        ) from error


def _check_same_model(path: Path, state: RunState, expected: RunState) -> None:
    if state.layout != expected.layout or state.architecture != expected.architecture:
        different = [
            f"{key} {state.architecture.get(key)} there, {expected.architecture.get(key)} here"
            for key in sorted({*state.architecture, *expected.architecture})
            if state.architecture.get(key) != expected.architecture.get(key)
        ]
        raise CheckpointError(
            problem(
                f"{path} is a checkpoint of another model ({'; '.join(different) or 'other parameter names'})",
                so="its weights do not fit",
                fix="resume with the config.toml of its run folder, or start a new run",
            )
        )


def _reason(error: BaseException, folder: Path) -> str:
    """DCP's last line, and what it does not say when a disk is full: how much room there is."""
    free = format_bytes(shutil.disk_usage(folder).free)
    return f"{str(error).strip().splitlines()[-1]} ({free} free on its disk)"


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
