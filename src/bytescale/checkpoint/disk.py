"""Every change that checkpoints make on the local file system goes through one ``Disk``; tests have their own."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import xxhash

from bytescale.common.atomic import sync_folder
from bytescale.common.errors import DiskFullError
from bytescale.common.units import format_bytes

_ROOM_FOR_LOGS = 2**20


def checksum_of(content: bytes | bytearray | memoryview) -> str:
    """XXH3 in 64 bits, as hex digits. It finds accidents, not forgeries: what a stranger wrote runs no code anyway."""
    return xxhash.xxh3_64_hexdigest(content)


class Disk:
    """The operations on the local file system that change something. All of them raise ``OSError``."""

    def before(self, operation: str, path: Path) -> None:
        """Called before each operation; tests override it."""

    def make_folder(self, path: Path) -> None:
        if not path.is_dir():
            self.before("make folder", path)
            path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> AbstractContextManager[BinaryIO]:
        self.before("create", path)
        return path.open("wb", buffering=0)

    def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
        self.before("write", Path(file.name))
        rest = memoryview(content)
        while len(rest):  # one write of the kernel may take a part only
            rest = rest[file.write(rest) :]

    def sync(self, file: BinaryIO) -> None:
        self.before("sync", Path(file.name))
        os.fsync(file.fileno())

    def sync_folder(self, folder: Path) -> None:
        self.before("sync folder", folder)
        sync_folder(folder)

    def write_file(self, path: Path, content: bytes) -> None:
        with self.create(path) as file:
            self.write(file, content)
            self.sync(file)

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename", source)
        source.replace(target)

    def remove(self, path: Path) -> None:
        self.before("remove", path)
        path.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> None:
        """Delete a folder and what is in it; it may be gone."""
        if not folder.is_dir():
            return
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                self.remove_folder(path)
            else:
                self.remove(path)
        self.before("remove folder", folder)
        folder.rmdir()

    def free_bytes(self, folder: Path) -> int:
        return shutil.disk_usage(folder).free


def make_room(disk: Disk, folder: Path, num_bytes: int) -> None:
    """Make ``folder``. Raises ``DiskFullError`` unless a checkpoint of ``num_bytes``, and the run's logs, have room."""
    disk.make_folder(folder)
    free = disk.free_bytes(folder)
    if free < num_bytes + _ROOM_FOR_LOGS:
        raise DiskFullError(
            f"the disk that holds {folder.parent} has {format_bytes(free)} free, and a checkpoint takes "
            f"{format_bytes(num_bytes)}",
            so="nothing was written",
            fix="free some space, or lower checkpoint.keep",
        )
