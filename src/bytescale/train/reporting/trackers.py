"""Trackers that receive a run's metrics in addition to metrics.jsonl: TensorBoard, Weights & Biases and trackio."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from bytescale.common.errors import ConfigError
from bytescale.common.parsing import read_text
from bytescale.config.schema import Config, LogConfig
from bytescale.train.run_folder import RunFolder


class Tracker(NamedTuple):
    """Receives the numbers of one step after another. Only the first rank has trackers."""

    log: Callable[[int, Mapping[str, float]], None]
    """Records the numbers of a step, by their names in metrics.jsonl."""
    close: Callable[[], None]
    """Writes what is still held back."""


def check_trackers(log: LogConfig) -> None:
    """Raise ``ConfigError`` if the config names a tracker whose package is not installed."""
    for package in log.trackers:
        found = importlib.util.find_spec(package)
        # A plain folder of that name, such as wandb/, is no package.
        if found is None or found.origin is None:
            raise ConfigError(
                f"log.trackers has {package}, and the package {package} is not installed",
                so="the run could not be tracked there",
                fix=f"pip install 'bytescale[{package}]', or leave it out",
            )


def open_trackers(run: RunFolder, config: Config) -> list[Tracker]:
    """The trackers that the config asks for.

    Raises:
        ConfigError: a package is missing, or a tracker refuses the run (not logged in, for example).
    """
    check_trackers(config.log)
    return [_TRACKERS[name](run, config) for name in config.log.trackers]


def _tensorboard(run: RunFolder, config: Config) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.tensorboard))

    def add(step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return Tracker(add, writer.close)


def _wandb(run: RunFolder, config: Config) -> Tracker:
    """A run of Weights & Biases, whose own variables say where it is filed. A resumed run goes on under the same id."""
    import wandb

    try:
        known = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "bytescale"),
            name=os.environ.get("WANDB_NAME", run.path.name),
            id=_known_id(run.wandb_id),
            resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow",
            dir=str(run.path),
            config=asdict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise _refused(
            "Weights & Biases", error, "run `wandb login`, set WANDB_MODE=offline, or leave wandb"
        ) from error
    known.define_metric("*", step_metric="step")  # a resumed run may take steps again
    return Tracker(lambda step, scalars: known.log({"step": step, **scalars}), known.finish)


def _trackio(run: RunFolder, config: Config) -> Tracker:
    """A run of trackio, in a database of this machine unless its own variables name a place.

    trackio knows runs by their names: a part of the id in the name tells apart those of folders with one name.
    """
    import trackio

    name = f"{run.path.name}-{_known_id(run.trackio_id)[:8]}"
    try:
        with contextlib.redirect_stdout(None):  # what it prints is not the command's
            known = trackio.init(
                "bytescale", name, resume="allow", config=asdict(config), embed=False, auto_log_cpu=False,
                auto_log_gpu=False,
            )  # fmt: skip
    except ValueError as error:
        raise _refused("trackio", error, "look at TRACKIO_SERVER_URL and TRACKIO_SPACE_ID, or leave trackio") from error

    def close() -> None:
        with contextlib.redirect_stdout(None):
            trackio.finish()  # and is not called once more when the process ends

    return Tracker(lambda step, scalars: known.log(dict(scalars), step=step), close)


_TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
"""By the names of their packages and of our extras."""


def _known_id(path: Path) -> str:
    """The id of a run, kept in its folder, so that a resumed run goes on under it."""
    if not path.exists():
        path.write_text(uuid.uuid4().hex + "\n", encoding="ascii")
    return read_text(path).strip()


def _refused(tracker: str, error: Exception, fix: str) -> ConfigError:
    return ConfigError(
        f"{tracker} did not accept the run: {error}",
        so="nothing would be tracked",
        fix=f"{fix} out of log.trackers",
    )
