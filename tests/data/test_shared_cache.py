"""Eight processes use one cache at the same time, as the ranks of a node do. Some are killed while they do."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale.common.atomic import file_lock
from bytescale.data.sources.files import SourceFile
from bytescale.data.tokens.open_parts import local_copy
from bytescale.storage.place import Url
from tests.data.http_server import Files, http_server

pytest.importorskip("aiohttp", reason="fsspec reads http:// with aiohttp")

FORK = multiprocessing.get_context("fork")
NUM_PROCESSES = 8
TOKENS = np.random.default_rng(0).integers(0, 2**16, 100_000).astype("<u2")
CONTENTS = {"/d.bin": TOKENS.tobytes(), "/d.idx": b"index" * 1000, "/d.meta.json": b"{}"}


@pytest.fixture
def files() -> Iterator[Files]:
    with http_server() as served:
        served.contents.update(CONTENTS)
        yield served


def in_processes(work: Callable[[int], Any]) -> list[int | None]:
    """Run ``work(number)`` in forked processes that begin at the same time, and return their exit codes."""
    barrier = FORK.Barrier(NUM_PROCESSES)
    processes = [FORK.Process(target=_begin, args=(barrier, work, number)) for number in range(NUM_PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)  # a limit for hangs
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in processes]


def _begin(barrier: Barrier, work: Callable[[int], Any], number: int) -> None:
    barrier.wait(60)
    work(number)


def pair_at(files: Files) -> SourceFile:
    return SourceFile(path=Url(f"{files.url}/d.bin"), num_bytes=TOKENS.nbytes, mtime_ns=1, format="bin")


def kinds_of_files(cache: Path) -> list[str]:
    return sorted(path.suffix for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_a_file_is_fetched_once(tmp_path: Path, files: Files) -> None:
    def fetch(number: int) -> None:
        check_copies(local_copy(pair_at(files), tmp_path)[0], files, tmp_path)

    assert in_processes(fetch) == [0] * NUM_PROCESSES
    assert kinds_of_files(tmp_path) == [".bin", ".idx", ".json"]
    sent = Counter(path for path, asked, _ in files.requests if asked)
    assert sent == {"/d.bin": 1, "/d.idx": 1, "/d.meta.json": 1}


def check_copies(copy: Path, files: Files, cache: Path) -> None:
    assert copy.with_suffix(".idx").read_bytes() == CONTENTS["/d.idx"]
    assert local_copy(pair_at(files), cache, whole=True) == (copy, False)
    assert copy.read_bytes() == CONTENTS["/d.bin"]


def test_a_process_that_is_killed_while_it_fetches_holds_nobody_up(tmp_path: Path, files: Files) -> None:
    has_begun = FORK.Event()

    class KilledInTheMiddle(io.BytesIO):
        def __init__(self) -> None:
            super().__init__(CONTENTS["/d.bin"])

        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                has_begun.set()  # this process has the lock
                os.kill(os.getpid(), signal.SIGKILL)
            return super().read(1000)

    def fetch(number: int) -> None:
        if number == 0:
            opened = Url.open
            Url.open = lambda path: KilledInTheMiddle() if path.suffix == ".bin" else opened(path)
        else:
            has_begun.wait(60)
        assert local_copy(pair_at(files), tmp_path, whole=True)[0].read_bytes() == CONTENTS["/d.bin"]

    assert in_processes(fetch) == [-signal.SIGKILL] + [0] * (NUM_PROCESSES - 1)
    assert kinds_of_files(tmp_path) == [".bin", ".idx", ".json"]


def test_a_lock_has_one_holder_and_dies_with_it(tmp_path: Path) -> None:
    number_of_holders = tmp_path / "count"
    number_of_holders.write_text("0")

    def count(number: int) -> None:
        for turn in range(20):
            with file_lock(tmp_path / "folder" / "lock"):
                holders = int(number_of_holders.read_text())
                number_of_holders.write_text(str(holders + 1))
                if number == 0 and turn == 10:
                    os.kill(os.getpid(), signal.SIGKILL)

    assert in_processes(count) == [-signal.SIGKILL] + [0] * (NUM_PROCESSES - 1)
    assert int(number_of_holders.read_text()) == 20 * (NUM_PROCESSES - 1) + 11
