"""Trackers that receive a run's metrics in addition to metrics.jsonl: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from bytescale.common.errors import ConfigError
from bytescale.config import Config
from bytescale.config.schema import LogConfig
from bytescale.train.run_folder import RunFolder


class Tracker(Protocol):
    """Receives the numbers of one step after another. Only the first rank has trackers."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the numbers of one step, by their names in metrics.jsonl."""

    def close(self) -> None:
        """Write what is still held back."""


def check_trackers(log: LogConfig) -> None:
    """Raise ``ConfigError`` if the config names a tracker whose package is not installed."""
    for setting, wanted, module, extra in (
        ("log.tensorboard", log.tensorboard, "tensorboard", "tensorboard"),
        ("log.wandb", log.wandb != "off", "wandb", "wandb"),
    ):
        if wanted and not _is_installed(module):
            raise ConfigError(
                f"{setting} is set but the package {module} is not installed",
                so="the run could not be tracked there",
                fix=f"pip install 'bytescale[{extra}]', or leave {setting} out",
            )


def open_trackers(run: RunFolder, config: Config) -> list[Tracker]:
    """The trackers that the config asks for.

    Raises:
        ConfigError: a package is missing, or Weights & Biases refuses the run (not logged in, for example).
    """
    check_trackers(config.log)
    trackers: list[Tracker] = []
    if config.log.tensorboard:
        trackers.append(TensorBoardTracker(run))
    if config.log.wandb != "off":
        trackers.append(WandbTracker(run, config))
    return trackers


class TensorBoardTracker:
    """Event files in the run folder's ``tensorboard/``."""

    def __init__(self, run: RunFolder) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.tensorboard))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases, by default named after the run folder. A resumed run goes on under the same id."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        import wandb

        log = config.log
        online = log.wandb == "online"
        settings = wandb.Settings(silent=True, console="off")
        try:
            self._run: Any = wandb.init(
                project=log.wandb_project,
                entity=log.wandb_entity or None,
                name=log.wandb_name or run.path.name,
                group=log.wandb_group or None,
                tags=log.wandb_tags,
                id=_run_id(run),
                resume="allow" if online else None,
                dir=str(run.path),
                config=asdict(config),
                mode="online" if online else "offline",
                settings=settings,
            )
        except wandb.Error as error:
            raise ConfigError(
                f"Weights & Biases did not accept the run: {error}",
                so="nothing would be tracked",
                fix='run `wandb login`, or set log.wandb to "offline" or "off"',
            ) from error
        self._run.define_metric("*", step_metric="step")  # a resumed run may take steps again

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def close(self) -> None:
        self._run.finish()


def _run_id(run: RunFolder) -> str:
    """The id that this run folder has at Weights & Biases: made once, then kept in the folder."""
    if not run.wandb_id.exists():
        run.wandb_id.write_text(uuid.uuid4().hex + "\n", encoding="ascii")
    return run.wandb_id.read_text(encoding="ascii").strip()


def _is_installed(module: str) -> bool:
    """Whether the package can be imported. A plain folder of that name, such as ``wandb/``, is no package."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
