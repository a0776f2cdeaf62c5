"""A run's folder: config.toml, log.txt, metrics.jsonl, plans/, checkpoints/, and what else a run is asked to keep."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from bytescale.common.atomic import whole_file
from bytescale.common.errors import ConfigError
from bytescale.common.parsing import parse_json, read_input
from bytescale.config.load import config_to_toml
from bytescale.config.schema import Config

logger = logging.getLogger(__name__)

_LOCK_SECONDS = 20.0
"""Ranks whose launcher was killed take a moment to end."""


class RunFolder:
    """Paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.origin = path / "origin"
        """What belongs to the weights (``train.origin``)."""
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.log = path / "log.txt"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.wandb_id = path / "wandb-id.txt"
        self.calibration = path / "calibration.jsonl"
        """What was learned of costs and speeds after every step (``train.parts.calibration``)."""
        self.traces = path / "traces"
        self.data = path / "data"

    def plan(self, step: int) -> Path:
        return self.path / "plans" / f"step-{step:06d}.npz"

    def trace(self, step: int) -> Path:
        return self.traces / f"step-{step:06d}.json"

    def create(self, config: Config, *, resume: bool, tokenizer: str | None = None) -> None:
        """Make the folders and write the resolved config. A resumed run writes it to an additional file.

        ``tokenizer``: as ``keep_origin``.
        """
        if not resume:
            check_is_new(self.path)
        for folder in (self.path, self.checkpoints, self.plan(0).parent):
            folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            from bytescale.train.origin import keep_origin  # a report needs no tokenizer

            keep_origin(self.origin, config, tokenizer)
        name = self.config
        if resume and self.config.exists():
            name = self.path / f"config-resumed-{datetime.now():%Y%m%d-%H%M%S}.toml"
        name.write_text(config_to_toml(config), encoding="utf-8")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder against other runs during the block. The kernel frees the lock when its holder dies.

        Raises ``ConfigError`` if another run holds the lock, and still does after some seconds.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while not _locked(descriptor):
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another run is writing to {self.path}",
                        so="both would write the same checkpoints",
                        fix="wait for it or stop it, or name another trainer.run_dir",
                    )
                time.sleep(0.1)
            yield
        finally:
            os.close(descriptor)


def check_can_be_made(path: Path) -> None:
    """Raise ``OSError`` if the folder ``path`` can be neither used nor made, and leave nothing behind."""
    made: list[Path] = []
    try:
        for folder in (*reversed(path.absolute().parents), path.absolute()):
            if not folder.is_dir():
                folder.mkdir()
                made.append(folder)
    finally:
        for folder in reversed(made):
            folder.rmdir()


def check_is_new(path: Path) -> None:
    """Raise ``ConfigError`` if something is already there, as a run never writes over another, and ``OSError`` if the
    folder cannot be made."""
    check_can_be_made(path)
    if path.exists() and any(path.iterdir()):
        raise ConfigError(
            f"the run folder {path} exists and is not empty",
            so="its metrics and checkpoints would be mixed with the new run's",
            fix=f"continue it with `bytescale train --resume {path}`, or name another trainer.run_dir",
        )


def keep_until(path: Path, step: int) -> list[str]:
    """Remove the lines after ``step`` from a file that has a line of JSON for every step, and what a kill has cut off.

    Returns the lines that stay; none where there was no file.
    """
    kept = []
    content = read_input(path, 2**30) if path.exists() else b""
    for found in re.finditer(rb"[^\r\n]+", content):
        line = found[0].decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            if parse_json(line)["step"] <= step:
                kept.append(line)
    with whole_file(path) as temporary:
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    return kept


def is_locked(path: Path) -> bool:
    """Whether a run is working in this folder now. On a file system without locks it is not known, and False."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return not _locked(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        logger.warning("the run folder's file system has no locks (%s): see that no other run writes there", error)
    return True
