"""``bytescale init``: a commented config to start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bytescale.config.load import DEMO_CONFIG


@dataclass(frozen=True)
class InitOptions:
    """Write a commented config to start from: bytescale init [FILE.toml]."""

    file: Annotated[Path, tyro.conf.Positional] = Path("bytescale.toml")
    """The file to write. It must not exist yet."""

    def run(self) -> int:
        """Return the exit code. Raises ``OSError`` if the file exists or cannot be written."""
        with self.file.open("x", encoding="utf-8") as file:
            file.write(DEMO_CONFIG.read_text(encoding="utf-8"))
        print(f"wrote {self.file}. It can train as it is. Edit it, then run:")
        print(f"  bytescale train {self.file} --dry-run   # check it, prepare the data, plan a batch, start nothing")
        print(f"  bytescale train {self.file}")
        return 0
