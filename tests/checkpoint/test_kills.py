"""A process that is killed before any of its operations on the disk: the newest complete checkpoint loads, bit for bit.

The operations are counted in a first run. Then the same run ends before the first of them, before the second, and so
on. A killed process changes nothing more on the disk, and that is how the quick version does it: its disk is dead from
then on. The exhaustive version sends SIGKILL to a process with several ranks.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest

from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.folder_of_run import complete_checkpoints, to_delete
from bytescale.checkpoint.verify import problems_of
from bytescale.common.errors import CheckpointError
from bytescale.config.schema import CheckpointConfig
from bytescale.runtime.mesh import MeshShape
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from tests.checkpoint.meshes import SHAPE, assert_states, restore, run_state, save, set_states, with_checkpointer
from tests.helpers.effort import one_of
from tests.helpers.forks import run_forked

ALONE = MeshShape(1)
SIGKILL_EVERY = 11
"""Real deaths of several ranks are tried before every eleventh operation, simulated ones before all of them."""
HISTORIES = {"grow and prune": (1, 2, 3), "the same step again": (2, 2)}


class Killed(BaseException):
    """The process is gone."""


class MortalDisk:
    """Counts what checkpoints change on the disk, and dies before number ``last`` of that, from 0; -1: never."""

    changes = ((os, "mkdir"), (io, "open"), (os, "fsync"), (os, "replace"), (os, "unlink"), (os, "rmdir"))

    def __init__(self, last: int = -1) -> None:
        self.last = last
        self.operations: list[str] = []
        self._lock = threading.Lock()

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as patched:
            for module, name in self.changes:
                patched.enter_context(patch.object(module, name, self._counted(name, getattr(module, name))))
            yield

    def _counted(self, name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if not is_of_checkpoints() or (name == "open" and "wb" not in arguments):
                return change(*arguments, **options)
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            self.before("fsync folder" if is_folder else name)
            made = change(*arguments, **options)
            return WatchedFile(made, self) if name == "open" else made

        return counted

    def before(self, operation: str) -> None:
        with self._lock:
            self.operations.append(operation)
            if 0 <= self.last < len(self.operations):
                self.die()

    def die(self) -> None:
        raise Killed


class KilledDisk(MortalDisk):
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class FullDisk(MortalDisk):
    """Takes nothing more from the operation ``last`` on, but deletes."""

    def before(self, operation: str) -> None:
        self.operations.append(operation)
        if 0 <= self.last < len(self.operations) and operation in ("write", "mkdir", "open", "fsync"):
            raise OSError(errno.ENOSPC, "No space left on device")


class WatchedFile:
    """A file that is written."""

    def __init__(self, file: Any, disk: MortalDisk) -> None:
        self._file, self._disk = file, disk

    def __enter__(self) -> WatchedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.raw.close()  # a dead process writes nothing that it still holds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: Any) -> None:
        self._disk.before("write")
        self._file.write(content)
        self._file.flush()


def is_of_checkpoints() -> bool:
    """Whether code of checkpoints has called, at whatever distance."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_globals["__name__"].startswith("bytescale.checkpoint"):
        frame = frame.f_back
    return frame is not None


def run_until(folder: Path, steps: tuple[int, ...], disk: MortalDisk, mesh: MeshShape = ALONE) -> None:
    with disk.watched():
        save(mesh, folder, *steps, keep=1)


def assert_usable(folder: Path, steps: tuple[int, ...], num_published: int) -> None:
    """What is named as a checkpoint is whole, the newest one is restored, and the run can save again."""
    for path in complete_checkpoints(folder):
        assert problems_of(path) == []

    def work(checkpoints: Checkpointer, optimizer: ShardedOptimizer) -> None:
        newest = checkpoints.newest()
        if num_published:
            assert newest is not None, "a checkpoint was published"
            step = checkpoints.restore(newest, optimizer, SHAPE.as_dict()).step
            assert step in steps[num_published - 1 : num_published + 1]
            assert_states(optimizer, step)
        set_states(optimizer, 9)
        checkpoints.save(run_state(9), optimizer)
        checkpoints.finish()

    with_checkpointer(ALONE, folder, work, keep=1)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000009"], "what was half written is gone"


@pytest.mark.parametrize(
    ("steps", "every"),
    one_of(
        [(steps, every) for steps in HISTORIES.values() for every in (True, False)],
        (list(HISTORIES.values())[-1], False),
    ),
)
def test_killed_before_every_operation(tmp_path: Path, steps: tuple[int, ...], every: bool) -> None:
    """The quick version takes the operations of the last checkpoint, and the first and the last of many writes."""
    counted = MortalDisk()
    run_until(tmp_path / "whole", steps, counted)
    kinds = {"mkdir", "open", "write", "fsync", "replace", "fsync folder", "unlink", "rmdir"}
    assert set(counted.operations) == kinds
    ends = [n for n, operation in enumerate(counted.operations) if operation == "replace"]
    published = ends[:1] + (ends[2::2] if len(set(steps)) == 1 else ends[1::2])
    points = [
        n
        for n, operation in enumerate(counted.operations)
        if every
        or (n > published[-2] and (operation != "write" or "write" not in counted.operations[n - 1 : n + 2 : 2]))
    ]
    for point in points:
        folder = tmp_path / str(point)
        with pytest.raises((AssertionError, CheckpointError), match="Killed"):
            run_until(folder, steps, MortalDisk(point))
        assert_usable(folder, steps, sum(point > end for end in published))


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", HISTORIES.values(), ids=HISTORIES)
def test_sigkill_before_operations_of_several_ranks(tmp_path: Path, steps: tuple[int, ...]) -> None:
    counted = MortalDisk()
    run_until(tmp_path / "whole", steps, counted, MeshShape(2, tp=2))
    for point in range(0, len(counted.operations), SIGKILL_EVERY):
        folder = tmp_path / str(point)
        with pytest.raises(AssertionError, match="died without an answer"):
            run_forked(1, lambda _, f=folder, p=point: run_until(f, steps, KilledDisk(p), MeshShape(2, tp=2)))
        before = complete_checkpoints(folder)
        for path in before:
            assert problems_of(path) == []
        if before:
            assert restore(MeshShape(2), folder) == int(before[-1].name.removeprefix("step-"))


@pytest.mark.exhaustive
def test_a_disk_that_fills_up_costs_the_new_checkpoint_alone(tmp_path: Path) -> None:
    """From any operation of the second checkpoint on: the run goes on, and the first checkpoint is kept."""
    counted = FullDisk()
    with counted.watched():
        save(MeshShape(2), tmp_path / "first", 1)
        first = len(counted.operations)
        save(MeshShape(2), tmp_path / "first", 2)
    opened = 2 * MeshShape(2).size  # the second save opened the folder once more than the runs below do
    for point in range(first, len(counted.operations) - opened, 13):
        folder, disk = tmp_path / str(point), FullDisk(point)

        def work(checkpoints, optimizer, disk=disk) -> None:  # type: ignore[no-untyped-def]
            for step in (1, 2):
                set_states(optimizer, step)
                checkpoints.save(run_state(step), optimizer)
            with pytest.raises(CheckpointError, match=r"could not be written .*No space left .*before it are whole"):
                checkpoints.finish()
            disk.last = -1
            set_states(optimizer, 3)
            checkpoints.save(run_state(3), optimizer)
            checkpoints.finish()

        with disk.watched():
            with_checkpointer(MeshShape(2), folder, work)
        assert sorted(path.name for path in folder.iterdir()) == ["step-000001", "step-000003"]
        assert restore(MeshShape(1), folder) == 3
        assert restore(MeshShape(1), folder, name="step-000001") == 1


def test_space_is_looked_at_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(MeshShape(2), tmp_path, 1)
    disk, small = MortalDisk(), shutil.disk_usage(tmp_path)._replace(free=2**20 + 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: small)
    with (
        disk.watched(),
        pytest.raises(AssertionError, match=r"has 1.* free, and a checkpoint takes .* Nothing was written"),
    ):
        save(MeshShape(2), tmp_path, 2)
    assert set(disk.operations) == {"mkdir", "rmdir"}
    assert restore(MeshShape(1), tmp_path) == 1


def test_which_checkpoints_are_kept() -> None:
    config = CheckpointConfig(keep=2, keep_every=30)
    assert to_delete([10, 20, 30, 40, 50], config) == [10, 20]
    assert to_delete([10, 20, 30, 40, 50], config, also_kept=[10]) == [20]
    assert to_delete([30, 60], CheckpointConfig(keep=1)) == [30]
    assert to_delete([], config) == []
