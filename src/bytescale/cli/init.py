"""``bytescale init``: a commented config to start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bytescale.cli.options import parse
from bytescale.common.errors import ConfigError
from bytescale.config.load import DEMO_CONFIG


@dataclass(frozen=True)
class InitOptions:
    """Write a commented config to start from: bytescale init [FILE.toml]."""

    file: Annotated[Path, tyro.conf.Positional] = Path("bytescale.toml")
    """The file to write. It must not exist yet."""


def run(arguments: Sequence[str]) -> int:
    """Run ``bytescale init``. Returns the exit code."""
    options = parse(InitOptions, arguments, prog="bytescale init")
    init(options.file)
    print(f"wrote {options.file}. It can train as it is. Edit it, then run:")
    print(f"  bytescale train {options.file} --dry-run   # check it, prepare the data, plan a batch, but start nothing")
    print(f"  bytescale train {options.file}")
    return 0


def init(path: Path) -> None:
    """Write the demo's config to ``path``. Raises ``ConfigError`` if the file exists or cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(DEMO_CONFIG.read_text(encoding="utf-8"))
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists already",
            so="its settings would be lost",
            fix="name another file, `bytescale init FILE.toml`, or remove the existing file",
        ) from error
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", fix="name a file in a folder that you may write to"
        ) from error
