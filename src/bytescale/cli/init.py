"""``bytescale init``: a commented config to start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bytescale.cli.options import parse
from bytescale.common.errors import ConfigError, problem
from bytescale.config.shipped import starter_config


@dataclass(frozen=True)
class InitOptions:
    """Write a commented config to start from: bytescale init [FILE.toml]."""

    file: Annotated[Path, tyro.conf.Positional] = Path("bytescale.toml")
    """The file to write; it must not exist."""


def run(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    options = parse(InitOptions, arguments, prog="bytescale init")
    init(options.file)
    print(f"{options.file} is written. It trains as it is; edit it, then:")
    print(f"  bytescale train {options.file} --dry-run   # check, prepare the data, plan a batch; start nothing")
    print(f"  bytescale train {options.file}")
    return 0


def init(path: Path) -> None:
    """Write the starter config to ``path``. Raises ``ConfigError`` if that exists or cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(starter_config())
    except FileExistsError as error:
        raise ConfigError(
            problem(
                f"{path} exists",
                so="its settings would be lost",
                fix="name another file, `bytescale init FILE.toml`, or remove this one",
            )
        ) from error
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(
            problem(f"{path} cannot be written: {error.strerror}", fix="name a file in a folder that you may write to")
        ) from error
