"""Copies a run's checkpoints behind a URL while training goes on.

A store has no rename. A checkpoint there is complete when its manifest is there, which is written last and deleted
first. Every rank uploads its own file, and the first rank the manifest once the store lists all files in their full
size. One checkpoint at a time is on its way: those that are due meanwhile stay on this machine alone.

While a run trains, only the thread of an upload talks to the store, and nobody waits for that thread.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

from bytescale.checkpoint.folder_of_run import to_delete
from bytescale.checkpoint.manifest import MANIFEST, Manifest, file_name, read_manifest, step_name, steps_in, unreachable
from bytescale.common.atomic import write_atomically
from bytescale.common.errors import CheckpointError, ConfigError
from bytescale.common.parsing import parse_json
from bytescale.config.schema import CheckpointConfig
from bytescale.storage.place import Place, Url, file_sizes, place_at, read_file
from bytescale.storage.retry import in_a_thread

logger = logging.getLogger(__name__)

OWNER_FILE = "written-by.json"
_PATIENCE_SECONDS = 300.0
"""Without a new byte from any rank, an upload is given up."""
_LOOK_SECONDS = 1.0
_SLOWEST_BYTES_PER_SECOND = 1e6
"""An upload of one file may take as long as at this speed, and ``_PATIENCE_SECONDS`` more."""


class Store:
    """The checkpoints of one run behind a URL. All methods raise ``OSError`` when the store does not answer."""

    def __init__(self, url: str) -> None:
        folder = place_at(url)
        assert isinstance(folder, Url), f"{url} is a URL"
        self.folder = folder

    def checkpoint(self, step: int) -> Url:
        return self.folder / step_name(step)

    def complete(self) -> list[int]:
        """Steps of the complete checkpoints, in rising order."""
        return [step for step in steps_in(self.folder) if self._is_complete(step)]

    def _is_complete(self, step: int) -> bool:
        """Whether the manifest is there and whole: a store may have cut it short."""
        folder = self.checkpoint(step)
        if MANIFEST not in file_sizes(folder):
            return False
        try:
            read_manifest(folder)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from error
            return False
        return True

    def put(self, source: Path, step: int) -> None:
        seconds = _PATIENCE_SECONDS + source.stat().st_size / _SLOWEST_BYTES_PER_SECOND
        (self.checkpoint(step) / source.name).put(source, seconds)

    def remove(self, step: int) -> None:
        folder = self.checkpoint(step)
        for name in sorted(file_sizes(folder), key=lambda name: (name != MANIFEST, name)):
            (folder / name).remove()

    def clean(self) -> None:
        """Delete what was half uploaded or half deleted when a run was killed."""
        for step in steps_in(self.folder):
            if MANIFEST not in file_sizes(self.checkpoint(step)):
                self.remove(step)


class Uploader:
    """One rank's part of the uploads."""

    def __init__(
        self,
        store: Store,
        folder: Path,
        config: CheckpointConfig,
        *,
        run_id: str,
        rank: int,
        log: Callable[[str], None],
    ) -> None:
        """``folder`` has the copies on this machine. ``rank``: of all, and the number of its file."""
        self.store = store
        self.config = config
        self.also_kept: list[int] = []  # steps of the best checkpoints by evaluation
        self.rank = rank
        self._folder = folder
        self._run_id = run_id
        self._log = log
        self._pending: tuple[int, Future[None]] | None = None
        self._failure: CheckpointError | None = None

    @property
    def step_under_way(self) -> int | None:
        """The checkpoint that this rank is uploading; None: none."""
        if self._pending is not None and self._pending[1].done():
            self._settle()
        return self._pending[0] if self._pending is not None else None

    def start(self, step: int) -> None:
        """Upload this rank's file in the background, and on the first rank the manifest behind all files."""
        self._settle()
        self._pending = step, in_a_thread(lambda: self._upload(step))

    def finish(self, seconds: float | None = None) -> None:
        """Wait for the upload under way, at most ``seconds``. Raises ``CheckpointError`` if the last one failed."""
        self._settle(seconds)
        if self._failure is not None:
            raise self._failure

    def _settle(self, seconds: float | None = None) -> None:
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        try:
            if not wait([future], seconds).done:
                raise CheckpointError(f"it did not arrive within {seconds:.0f} s")
            future.result()
            self._failure = None
        except (OSError, CheckpointError, ConfigError) as error:
            cause = unreachable(error, self.store.folder) if isinstance(error, OSError) else error
            local = self._folder / step_name(step)
            self._failure = CheckpointError(
                f"the checkpoint {step_name(step)} could not be uploaded ({str(cause).rstrip('.')})",
                so=f"the copy in {self._folder} is whole, and so are older checkpoints in {self.store.folder}",
                fix=f"when the store answers again, copy {local} there, {MANIFEST} last",
            )
            self._failure.__cause__ = cause
            if self.rank == 0:
                self._log(f"warning {self._failure}")
            else:
                logger.warning("%s", self._failure)

    def _upload(self, step: int) -> None:
        local = self._folder / step_name(step)
        self.store.put(local / file_name(self.rank), step)
        if self.rank:
            return
        manifest = read_manifest(local)
        self._wait_for_all(step, manifest)
        check_owner(self.store.folder, self._run_id)
        self.store.put(local / MANIFEST, step)
        if read_file(self.store.checkpoint(step) / MANIFEST) != (local / MANIFEST).read_bytes():
            raise CheckpointError(f"{self.store.checkpoint(step)}/{MANIFEST} is not what was sent")
        for old in to_delete(self.store.complete(), self.config, also_kept=self.also_kept):
            self.store.remove(old)

    def _wait_for_all(self, step: int, manifest: Manifest) -> None:
        """Wait until the store has every rank's file. Raises ``CheckpointError`` when nothing arrives any more."""
        wanted = {file_name(number): file.num_bytes for number, file in enumerate(manifest.files)}
        before, deadline = -1, time.monotonic() + _PATIENCE_SECONDS
        while True:
            there = file_sizes(self.store.checkpoint(step))
            missing = [name for name, size in wanted.items() if there.get(name) != size]
            if not missing:
                return
            if len(missing) != before:
                before, deadline = len(missing), time.monotonic() + _PATIENCE_SECONDS
            if time.monotonic() > deadline:
                raise CheckpointError(f"{len(missing)} of {len(wanted)} files did not arrive, {missing[0]} among them")
            time.sleep(_LOOK_SECONDS)


def claim(folder: Place, run_id: str) -> None:
    """Note that this run writes its checkpoints into ``folder``. Raises ``ConfigError`` if another run does."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
    if OWNER_FILE not in file_sizes(folder):
        file, content = folder / OWNER_FILE, json.dumps({"run_id": run_id}).encode()
        if isinstance(file, Path):
            write_atomically(file, content)
        else:
            file.write_bytes(content)
    check_owner(folder, run_id)


def check_owner(folder: Place, run_id: str) -> None:
    """Raise ``ConfigError`` unless the checkpoints in ``folder`` are this run's."""
    try:
        owner = parse_json(read_file(folder / OWNER_FILE))["run_id"]
    except (ValueError, KeyError, TypeError) as error:
        owner = f"an unknown run ({error})"
    if owner != run_id:
        raise ConfigError(
            f"another run writes its checkpoints into {folder}",
            so="the two runs would delete each other's checkpoints",
            fix=f"name another checkpoint.folder; or, if that run is over, delete {folder}/{OWNER_FILE}",
        )


def run_id_of(folder: Path) -> str:
    """A name of the run whose folder of checkpoints this is, made at its first start."""
    path = folder / ".run-id"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, uuid.uuid4().hex.encode())
    return path.read_text(encoding="utf-8")
