"""Checkpoints through torch.distributed.checkpoint (DCP): whole at any moment, loadable on any number of ranks.

Master weights and Adam moments are stored under the model's own names and shapes (``checkpoint.pieces``), so that any
mesh reads what any other wrote. A checkpoint is written into a hidden folder and renamed when every rank's part is on
disk: a folder named ``step-*`` is always complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from bytescale.checkpoint.format_2 import load_tensors
from bytescale.checkpoint.pieces import PieceReader, PieceWriter, host_copies, stored_pieces
from bytescale.common.errors import CheckpointError, problem
from bytescale.common.units import format_bytes
from bytescale.config import CheckpointConfig
from bytescale.runtime import ShardedAdamW

FORMAT = 2
"""Of checkpoints: 1 stored flat buffers, and was never released."""
STATE_FILE = "run_state.json"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything but tensors that continuing exactly needs."""

    step: int  # optimizer updates done
    sampler: dict[str, Any]  # where the data order stands
    architecture: dict[str, Any]
    mesh: dict[str, int]  # that wrote it; for people only
    format: int = FORMAT


class Participants(Protocol):
    """The ranks that write and read checkpoints together, as one of them sees them."""

    @property
    def is_first(self) -> bool:
        """Whether this rank publishes and deletes checkpoints."""
        ...

    @property
    def checkpoint_group(self) -> dist.ProcessGroup:
        """All ranks, in a group of gloo that nothing else uses meanwhile."""
        ...


class Checkpointer:
    """Writes, prunes and restores the checkpoints of one run. Every method is called by every rank."""

    def __init__(self, folder: Path, ranks: Participants, config: CheckpointConfig) -> None:
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
            (hidden / STATE_FILE).write_text(json.dumps(asdict(state)), encoding="utf-8")
        dist.barrier(group=self.ranks.checkpoint_group)
        writing = self._thread.submit(
            dcp.save,
            stored_pieces(optimizer, host_copies(optimizer)),
            checkpoint_id=str(hidden),
            planner=PieceWriter(),
            process_group=self.ranks.checkpoint_group,
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

    def restore(self, path: Path, optimizer: ShardedAdamW, architecture: dict[str, Any]) -> RunState:
        """Fill the optimizer and the parameters from ``path``; ``architecture`` is this run's own.

        Raises ``CheckpointError`` when the checkpoint is of another model.
        """
        state = read_run_state(path)
        check_same_model(path, state.architecture, architecture)
        load_states(path, optimizer, self.ranks.checkpoint_group)
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


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if re.fullmatch(r"step-\d+", path.name))


def read_run_state(path: Path) -> RunState:
    """What a checkpoint says of itself."""
    try:
        content = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        if content.get("format") != FORMAT:
            raise ValueError(f"format {content.get('format', 1)}, this version reads {FORMAT}")
        return RunState(**content)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            problem(f"{path} is not a checkpoint of bytescale: {error}", fix="name a folder checkpoints/step-*")
        ) from error


def load_states(
    path: Path, optimizer: ShardedAdamW, group: dist.ProcessGroup, *, only: Sequence[str] | None = None
) -> None:
    """Fill this rank's slices from a checkpoint of any mesh; ``only`` some of the states (``optimizer.states``)."""
    own = optimizer.states()
    loaded = {
        name: [torch.zeros_like(values, device="cpu") for values in parts]
        for name, parts in own.items()
        if only is None or name in only
    }
    load_tensors(path, dict(stored_pieces(optimizer, loaded)), planner=PieceReader(), group=group)
    for name, parts in loaded.items():
        for values, read in zip(own[name], parts, strict=True):
            values.copy_(read)


def check_same_model(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise ``CheckpointError`` when two architectures differ, with what differs."""
    different = [
        f"{key} {there.get(key)} there, {here.get(key)} here"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    ]
    if different:
        raise CheckpointError(
            problem(
                f"{path} is a checkpoint of another model ({'; '.join(different)})",
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
