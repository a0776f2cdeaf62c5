"""Trackers that receive a run's metrics in addition to metrics.jsonl: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

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
        ConfigError: a package is missing, or Weights & Biases refuses the run (not logged in, for example).
    """
    check_trackers(config.log)
    trackers = []
    if "tensorboard" in config.log.trackers:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run.tensorboard))

        def add(step: int, scalars: Mapping[str, float]) -> None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)

        trackers.append(Tracker(add, writer.close))
    if "wandb" in config.log.trackers:
        known = _wandb_run(run, config)
        trackers.append(Tracker(lambda step, scalars: known.log({"step": step, **scalars}), known.finish))
    return trackers


def _wandb_run(run: RunFolder, config: Config) -> Any:
    """A run of Weights & Biases, whose own variables say where it is filed. A resumed run goes on under the same id."""
    import wandb

    if not run.wandb_id.exists():
        run.wandb_id.write_text(uuid.uuid4().hex + "\n", encoding="ascii")
    try:
        known = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "bytescale"),
            name=os.environ.get("WANDB_NAME", run.path.name),
            id=read_text(run.wandb_id).strip(),
            resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow",
            dir=str(run.path),
            config=asdict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise ConfigError(
            f"Weights & Biases did not accept the run: {error}",
            so="nothing would be tracked",
            fix="run `wandb login`, set WANDB_MODE=offline, or leave wandb out of log.trackers",
        ) from error
    known.define_metric("*", step_metric="step")  # a resumed run may take steps again
    return known
