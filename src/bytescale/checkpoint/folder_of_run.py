"""The folder with a run's checkpoints on this machine's file system: what is complete, and what may be deleted.

A checkpoint is written into a hidden folder, ``.step-000050.tmp``, and renamed when all of it is on disk. To delete
one, it gets a hidden name first. So a folder named ``step-*`` is complete, whenever a process is killed.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from bytescale.checkpoint.manifest import step_name, steps_in
from bytescale.common.atomic import sync_folder
from bytescale.common.errors import typed_path
from bytescale.config.schema import CheckpointConfig
from bytescale.storage.place import is_url


def local_folder(configured: str, own: Path) -> Path:
    """Where this machine keeps checkpoints: in ``configured`` unless that is empty or a URL, else in ``own``."""
    return typed_path(configured) if configured and not is_url(configured) else own


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in ``folder``, oldest first."""
    return [folder / step_name(step) for step in steps_in(folder)]


def remove_folder(folder: Path) -> None:
    """Delete a folder and what is in it; it may be gone. Raises ``OSError``."""
    if folder.is_dir():
        shutil.rmtree(folder)


def hidden_folder(folder: Path, step: int) -> Path:
    return folder / f".{step_name(step)}.tmp"


def publish(hidden: Path, final: Path) -> None:
    """Give a complete checkpoint its name. One that has the name already is kept until then, and deleted."""
    doomed = final.with_name(f".{final.name}.replaced.tmp")
    if final.exists():
        final.replace(doomed)
    hidden.replace(final)
    sync_folder(final.parent)
    remove_folder(doomed)


def clean(folder: Path) -> None:
    """Delete what a run that was killed has left half written or half deleted."""
    if not folder.is_dir():
        return
    for leftover in sorted(folder.glob(".step-*.replaced.tmp")):  # killed between the two renames of ``publish``
        final = leftover.with_name(leftover.name.removeprefix(".").removesuffix(".replaced.tmp"))
        if not final.exists():
            leftover.replace(final)
    for leftover in sorted(folder.glob(".step-*.tmp")):
        remove_folder(leftover)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint. It is renamed first: a half-deleted folder is never taken for a checkpoint."""
    doomed = checkpoint.with_name(f".{checkpoint.name}.tmp")
    checkpoint.replace(doomed)
    remove_folder(doomed)


def to_delete(steps: Sequence[int], config: CheckpointConfig, *, also_kept: Collection[int] = ()) -> list[int]:
    """The steps whose checkpoints are not kept, of all that are complete, in rising order.

    Kept are the newest ``keep``, every one whose step ``keep_every`` divides, and ``also_kept``.
    """
    newest = set(sorted(steps)[-config.keep :])
    for_ever = {step for step in steps if config.keep_every and step % config.keep_every == 0}
    return [step for step in sorted(steps) if step not in newest | for_ever | set(also_kept)]
