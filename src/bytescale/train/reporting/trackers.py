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
    """The trackers of the config. Raises ``ConfigError`` where a package is missing, or a tracker refuses the run."""
    check_trackers(config.log)
    opened = []
    for name in dict.fromkeys(config.log.trackers):
        opens, fix = _TRACKERS[name]
        try:
            opened.append(opens(run, config))
        except Exception as error:
            what, fix = f"{name} did not accept the run: {error}", f"{fix}, or leave it out of log.trackers"
            raise ConfigError(what, so="nothing would be tracked", fix=fix) from error
    return opened


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

    known = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "bytescale"),
        name=os.environ.get("WANDB_NAME", run.path.name),
        id=_known_id(run.wandb_id),
        resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow",
        dir=str(run.path),
        config=asdict(config),
        settings=wandb.Settings(silent=True, console="off"),
    )
    known.define_metric("*", step_metric="step")  # a resumed run may take steps again
    return Tracker(lambda step, scalars: known.log({"step": step, **scalars}), known.finish)


def _trackio(run: RunFolder, config: Config) -> Tracker:
    """A run of trackio, which knows runs by their names: an id in the name tells apart those of folders of one name."""
    import trackio

    name = f"{run.path.name}-{_known_id(run.path / 'trackio-id.txt')[:8]}"
    alone = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    with contextlib.redirect_stdout(None):  # what it prints is not the command's
        known = trackio.init("bytescale", name, resume="allow", config=asdict(config), **alone)

    def close() -> None:
        with contextlib.redirect_stdout(None):
            trackio.finish()  # and is not called once more when the process ends

    return Tracker(lambda step, scalars: known.log(dict(scalars), step=step), close)


_TRACKERS = {  # by the names of their packages and of our extras: what opens them, and what to do where they refuse
    "tensorboard": (_tensorboard, "make room in the run folder"),
    "wandb": (_wandb, "run `wandb login`, set WANDB_MODE=offline"),
    "trackio": (_trackio, "look at TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL"),
}


def _known_id(path: Path) -> str:
    """The id of a run, kept in its folder, so that a resumed run goes on under it."""
    if not path.exists():
        path.write_text(uuid.uuid4().hex + "\n", encoding="ascii")
    return read_text(path).strip()
