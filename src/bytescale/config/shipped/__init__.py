"""Configs that come with the package: ``bytescale train NAME`` finds them by the name of their file."""

from __future__ import annotations

from pathlib import Path

from bytescale.common.errors import ConfigError, problem
from bytescale.config.load import nearest

_FOLDER = Path(__file__).parent
_STARTER = "starter"


def shipped_configs() -> dict[str, Path]:
    """The configs that can be trained by name: name -> TOML file."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml")) if path.stem != _STARTER}


def starter_config() -> str:
    """The commented TOML that ``bytescale init`` writes."""
    return (_FOLDER / f"{_STARTER}.toml").read_text(encoding="utf-8")


def find_config(name: str) -> Path:
    """The TOML file that ``name`` means: that file if it exists, else the config of this name that ships.

    Raises ``ConfigError`` where there is neither.
    """
    path, shipped = Path(name), shipped_configs()
    if path.is_file():
        return path
    if name in shipped:
        return shipped[name]
    if path.stem in shipped:
        fix = f"write `{path.stem}`, the config of this name that comes with bytescale, or the path of a TOML file"
    else:
        fix = (
            f"name a TOML file (`bytescale init` writes one), or a config that comes with bytescale; "
            f"{nearest(path.stem, shipped)}"
        )
    raise ConfigError(problem(f"there is no config file {name}", so="there are no settings to use", fix=fix))
