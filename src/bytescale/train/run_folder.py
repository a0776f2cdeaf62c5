"""A run's folder: config.toml, metrics.jsonl, log.txt, plans/ and checkpoints/."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bytescale.common.errors import ConfigError, problem
from bytescale.config import Config, config_to_toml


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def plan(self, step: int) -> Path:
        return self.path / "plans" / f"step-{step:06d}.npz"

    def create(self, config: Config, *, resume: bool) -> None:
        """Make the folders and write the resolved config (beside the first one, when a run is resumed)."""
        if not resume:
            check_is_new(self.path)
        for folder in (self.path, self.checkpoints, self.plan(0).parent):
            folder.mkdir(parents=True, exist_ok=True)
        name = self.config
        if resume and self.config.exists():
            name = self.path / f"config-resumed-{datetime.now():%Y%m%d-%H%M%S}.toml"
        name.write_text(config_to_toml(config), encoding="utf-8")


def default_run_dir(config_name: str) -> str:
    """``runs/<config name>-<date>-<time>``."""
    return f"runs/{config_name}-{datetime.now():%Y%m%d-%H%M%S}"


def check_is_new(path: Path) -> None:
    """Raise ``ConfigError`` if something is already there: a run never writes over another."""
    if path.exists() and any(path.iterdir()):
        raise ConfigError(
            problem(
                f"the run folder {path} exists and is not empty",
                so="its metrics and checkpoints would be mixed with the new run's",
                fix=f"continue it with `bytescale train --resume {path}`, or name another trainer.run_dir",
            )
        )
