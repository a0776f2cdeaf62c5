"""What checkpoints need of the local file system: checksums, files that are on disk, and room for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import xxhash

from bytescale.common.errors import DiskFullError
from bytescale.common.units import format_bytes

_ROOM_FOR_LOGS = 2**20


def checksum_of(content: bytes | bytearray | memoryview) -> str:
    """XXH3 in 64 bits, as hex digits. It finds accidents, not forgeries: what a stranger wrote runs no code anyway."""
    return xxhash.xxh3_64_hexdigest(content)


def write_to_disk(path: Path, contents: Iterable[bytes | memoryview]) -> None:
    """Write ``contents``, one behind the other, and wait until they are on disk. Raises ``OSError``."""
    with path.open("wb") as file:
        for content in contents:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


def remove_folder(folder: Path) -> None:
    """Delete a folder and what is in it; it may be gone. Raises ``OSError``."""
    if folder.is_dir():
        shutil.rmtree(folder)


def make_room(folder: Path, num_bytes: int) -> None:
    """Make ``folder``. Raises ``DiskFullError`` unless a checkpoint of ``num_bytes``, and the run's logs, have room."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _ROOM_FOR_LOGS:
        raise DiskFullError(
            f"the disk that holds {folder.parent} has {format_bytes(free)} free, and a checkpoint takes "
            f"{format_bytes(num_bytes)}",
            so="nothing was written",
            fix="free some space, or lower checkpoint.keep",
        )
