"""Where a run's lines appear: plain output, or a terminal with a live bar below them that shows the time left."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_SPEED_SECONDS = 600.0
"""The time left is estimated from the steps of this many last seconds: a step may take minutes."""


class Screen:
    """Shows lines to people. Every line goes to a function; there is no bar."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line

    @property
    def width(self) -> int:
        """Columns of a line; longer ones are wrapped."""
        return sys.maxsize

    def line(self, text: str) -> None:
        self._print_line(text)

    def progress(self, steps_done: int, total_steps: int) -> None:
        """Show the progress of the run until the next call."""

    def close(self) -> None:
        """Remove the progress that is shown."""


def screen_of_stdout() -> Screen:
    """A live bar where standard output is a terminal that can draw one; plain lines in pipes, files and CI."""
    console = console_of(sys.stdout)
    under_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")  # a variable that all CI services set
    is_live = sys.stdout.isatty() and not console.is_dumb_terminal and not under_ci
    return LiveScreen(console) if is_live else Screen(print)


def console_of(file: TextIO | None = None, *, quiet: bool = False) -> Console:
    """Of standard output; shows text as it is: no markup, no colours of its own, no line breaks of its own."""
    return Console(file=file, quiet=quiet, soft_wrap=True, highlight=False, markup=False, emoji=False)


class LiveScreen(Screen):
    """Lines scroll by above a bar that stays at the bottom of the terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(console.print)
        self._console = console
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("left"),
            console=console,
            transient=True,
            expand=True,
            refresh_per_second=2,
            speed_estimate_period=_SPEED_SECONDS,
        )
        self._task: TaskID | None = None

    @property
    def width(self) -> int:
        return self._console.width

    def line(self, text: str) -> None:
        """Long text is broken between words. Indented lines are commands: broken by us, they could not be copied."""
        if not text.startswith(" "):
            indent = " " * 8
            text = textwrap.fill(
                text, self.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        self._console.print(text)

    def progress(self, steps_done: int, total_steps: int) -> None:
        if self._task is None:
            self._task = self._bar.add_task("", total=total_steps, completed=steps_done)
            self._bar.start()
        else:
            self._bar.update(self._task, completed=steps_done, refresh=True)

    def close(self) -> None:
        if self._task is not None:
            self._bar.stop()
            self._task = None
