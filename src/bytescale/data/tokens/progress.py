"""Progress of long work: the callback that it calls, and a progress bar to use as that callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far one sample of work has come."""

    stage: str
    """What is being done, in a few words, such as ``"tokenising"``."""
    done_bytes: int
    total_bytes: int
    note: str = ""
    """The result so far, in a few words, such as ``"12 documents, 3K tokens"``."""


ProgressCallback = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """A callback that does nothing."""


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """Yield a callback that draws one line per stage on stderr."""
    bar = RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )
    tasks = {}

    def show(progress: Progress) -> None:
        if progress.stage not in tasks:
            tasks[progress.stage] = bar.add_task(progress.stage, total=progress.total_bytes, note="")
        bar.update(tasks[progress.stage], completed=progress.done_bytes, total=progress.total_bytes, note=progress.note)

    with bar:
        yield show
