"""The checkpoints of one run: written while training goes on, whole at any moment, loadable on any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bytescale.checkpoint.agree import together
from bytescale.checkpoint.folder_of_run import (
    clean,
    complete_checkpoints,
    delete,
    hidden_folder,
    local_folder,
    publish,
    remove_folder,
    to_delete,
)
from bytescale.checkpoint.manifest import MANIFEST, RunState, step_name, step_of, unreachable
from bytescale.checkpoint.reading import load_states
from bytescale.checkpoint.upload import Store, Uploader, claim, run_id_of
from bytescale.checkpoint.writing import RankStates, write_checkpoint
from bytescale.common.errors import BytescaleError, CheckpointError, DiskFullError, RankFailure
from bytescale.config.schema import CheckpointConfig
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.plain_data import broadcast_json
from bytescale.storage.place import Place, is_url, place_at


class Checkpointer:
    """Writes, prunes and restores the checkpoints of one run. Every method is called by every rank."""

    def __init__(
        self,
        folder: Path,
        group: dist.ProcessGroup,
        config: CheckpointConfig,
        *,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Claim ``config.folder``. Nothing is written or deleted in a folder that is only read from.

        Args:
            folder: the run's own, for its checkpoints, or for copies if ``config.folder`` is a URL.
            group: all ranks, in a group of gloo that nothing else uses meanwhile.
            log: takes what people should know; called on the first rank.

        Raises ``ConfigError`` on every rank when another run writes to ``config.folder``, and ``CheckpointError`` when
        that cannot be reached.
        """
        self.folder = local_folder(config.folder, folder)
        self.config = config
        self._group = group
        self._is_first = group.rank() == 0
        self._log = log
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bytescale-checkpoint")
        self._pending: tuple[int, Future[None]] | None = None  # with its step
        self._failure: CheckpointError | None = None  # of the newest checkpoint, where it could not be written
        self._is_clean = False
        self._uploader: Uploader | None = None
        self._not_uploaded: int | None = None  # a step that was due while an older one was on its way
        with together(group):
            self._open(folder)

    def save(self, state: RunState, optimizer: ShardedOptimizer) -> None:
        """Write ``step-<n>`` in the background: tensors are copied now, files follow while training goes on.

        A checkpoint that finds no place, or that the disk refuses, is given up with a message: the run goes on, and
        the checkpoints before it are kept. ``finish`` raises if that was the last one.
        """
        self._settle()
        state, copies = replace(state, numbers=optimizer.state_numbers()), RankStates.of(optimizer).copied()
        self._pending = state.step, self._thread.submit(self._write, state, copies)

    def poll(self) -> None:
        """Look whether the checkpoint under way is complete. Cheap; call once a step."""
        if self._pending is not None and self._pending[1].done():
            self._settle()

    def finish(self, upload_seconds: float | None = None) -> None:
        """Wait until the last checkpoint is published, and uploaded, for at most ``upload_seconds``.

        Raises ``CheckpointError`` if the last checkpoint could not be written or uploaded.
        """
        self._settle()
        if self._failure is not None:
            raise self._failure
        if self._uploader is None:
            return
        deadline = None if upload_seconds is None else time.monotonic() + upload_seconds
        try:
            self._finish_upload(deadline)
        except BytescaleError:
            if self._not_uploaded is not None:
                self._log(f"{self.folder / step_name(self._not_uploaded)} is on this machine alone")
            raise
        if self._not_uploaded is not None:
            self._start_upload(self._not_uploaded)
            self._finish_upload(deadline)

    def close(self) -> None:
        """Give up what is under way, once the group is left: nobody writes here any more."""
        self._pending = None
        self._thread.shutdown(wait=True)

    def latest(self) -> Path | None:
        """The newest complete checkpoint on this machine's file system."""
        complete = complete_checkpoints(self.folder)
        return complete[-1] if complete else None

    def newest(self) -> Place | None:
        """The newest complete checkpoint, here or behind ``config.folder``. Every rank gets the same one.

        A copy here counts only if all ranks see it: the nodes may have disks of their own.
        """
        group = self._group
        with together(group):
            self._clean_once()
        own = self.latest()
        name = broadcast_json(own.name if own is not None else "", group)
        local = self.folder / name if name else None
        if self._uploader is None:
            return local
        seen = torch.tensor([int(local is not None and (local / MANIFEST).is_file())])
        dist.all_reduce(seen, op=dist.ReduceOp.MIN, group=group)
        with together(group):
            url = self._newest_url(step_of(name) if int(seen) else -1)
        url = broadcast_json(url, group)
        return place_at(url) if url else (local if int(seen) else None)

    def restore(self, path: Place, optimizer: ShardedOptimizer, architecture: dict[str, Any]) -> RunState:
        """Fill the optimizer and the parameters from ``path``; ``architecture`` is this run's own.

        Raises ``CheckpointError`` when the checkpoint is of another model, or damaged.
        """
        state = load_states(path, optimizer, architecture, self._group)
        known = optimizer.state_numbers()
        optimizer.finish_restore(state.step, {name: own for name, own in state.numbers.items() if name in known})
        return state

    def _write(self, state: RunState, copies: RankStates) -> None:
        """Write, publish and prune. Every rank runs this in its background thread."""
        group, hidden = self._group, hidden_folder(self.folder, state.step)
        with together(group):
            self._clean_once()
        try:
            write_checkpoint(hidden, state, copies, group)
        except BaseException:
            if self._is_first:
                with suppress(OSError):  # the error that is raised says more
                    remove_folder(hidden)
            raise
        with together(group):
            if self._is_first:
                self._publish(hidden, state)
        if self._uploader is not None:
            self._uploader.also_kept = best_step(state)
            self._start_upload(state.step)

    def _clean_once(self) -> None:
        """Delete what a killed run has left half written. For the first rank, before this run uses the folder."""
        if self._is_first and not self._is_clean:
            clean(self.folder)
        self._is_clean = True

    def _open(self, own_folder: Path) -> None:
        is_first, run_id = self._is_first, ""
        try:
            store = Store(self.config.folder) if is_url(self.config.folder) else None
            if is_first and self.config.folder:
                run_id = run_id_of(own_folder)
                claim(self.folder if store is None else store.folder, run_id)
            if is_first and store is not None:
                store.clean()
        except OSError as error:
            raise unreachable(error, self.config.folder) from error
        if store is not None:
            rank = self._group.rank()
            self._uploader = Uploader(store, self.folder, self.config, run_id=run_id, rank=rank, log=self._log)

    def _start_upload(self, step: int) -> None:
        """Upload this checkpoint unless a rank is still busy with an older one. Every rank calls this."""
        assert self._uploader is not None, "there is a URL"
        is_busy = torch.tensor([int(self._uploader.step_under_way is not None)])
        dist.all_reduce(is_busy, op=dist.ReduceOp.MAX, group=self._group)
        self._not_uploaded = step if is_busy else None
        if not is_busy:
            self._uploader.start(step)

    def _finish_upload(self, deadline: float | None) -> None:
        assert self._uploader is not None, "there is a URL"
        with together(self._group):
            if self._uploader.step_under_way is not None:
                self._log(f"waiting for {step_name(self._uploader.step_under_way)} to arrive in {self.config.folder}")
            self._uploader.finish(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _newest_url(self, local_step: int) -> str:
        """Return the URL of a complete checkpoint newer than ``local_step``, or an empty string. For the first rank."""
        if self._uploader is None or not self._is_first:
            return ""
        try:
            steps = self._uploader.store.complete()
        except OSError as error:
            raise unreachable(error, self.config.folder) from error
        newer = [step for step in steps if step > local_step]
        return str(self._uploader.store.checkpoint(newer[-1])) if newer else ""

    def _publish(self, hidden: Path, state: RunState) -> None:
        publish(hidden, self.folder / step_name(state.step))
        complete = {step_of(path.name): path for path in complete_checkpoints(self.folder)}
        under_way = self._uploader.step_under_way if self._uploader is not None else None
        kept = [*best_step(state), *([] if under_way is None else [under_way])]
        for step in to_delete(list(complete), self.config, also_kept=kept):
            delete(complete[step])

    def _settle(self) -> None:
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        try:
            future.result()
            self._failure = None
        except (OSError, DiskFullError, CheckpointError) as error:
            self._failure = self._not_written(step, error)
            self._log(f"warning {self._failure}")
        except RankFailure:
            raise
        except Exception as error:  # a mistake of ours
            raise self._not_written(step, error) from error

    def _not_written(self, step: int, error: Exception) -> CheckpointError:
        kind = "" if isinstance(error, (OSError, BytescaleError)) else f"{type(error).__name__}: "
        reason = str(error).split(" To fix:")[0].strip().removesuffix(".")
        failure = CheckpointError(
            f"the checkpoint {step_name(step)} could not be written ({kind}{reason})",
            so="the checkpoints before it are whole",
            fix=f"look at the disk that holds {self.folder}, then resume",
        )
        failure.__cause__ = error
        return failure


def best_step(state: RunState) -> list[int]:
    """The step of the checkpoint with the lowest loss, if the run keeps it."""
    return [int(state.best["step"])] if state.best.get("kept") else []
