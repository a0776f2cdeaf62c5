"""``bytescale train`` on the workers of Ray Train, which places, starts and watches them, and starts them again.

Each worker is a rank. The options are those of ``bytescale train``. What a run prints is in log.txt of its folder.

    python examples/ray_train.py CONFIG.toml --parallel.ranks 2 --trainer.run-dir runs/NAME --max-restarts 3
    python examples/ray_train.py --resume runs/NAME
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bytescale.cli.train import TrainOptions, read_options, start_training
from bytescale.data.remote.ray_cluster import ray_cluster  # sets what Ray reads when it is imported

import ray  # isort: skip
from ray.train import FailureConfig, RunConfig, ScalingConfig  # isort: skip
from ray.train.torch import TorchTrainer  # isort: skip


def one_rank(given: dict[str, Any]) -> None:
    """Train as a worker. Ray has set the variables of torchrun, and has made a process group with them."""
    os.chdir(given["folder"])  # Ray Train has changed it
    store = next(dist.rendezvous("env://"))  # the ranks meet there again, so it must not end with Ray's group
    dist.destroy_process_group()
    start_training(of_attempt(given["options"]))
    del store


def of_attempt(options: TrainOptions) -> TrainOptions:
    """Go on from the last checkpoint if the run has begun, because Ray starts all workers again when one is lost."""
    trainer = options.config.trainer
    has_begun = Path(trainer.run_dir, "config.toml").exists()
    trainer = replace(trainer, resume=trainer.resume or has_begun)
    return replace(options, config=replace(options.config, trainer=trainer))


def main(arguments: Sequence[str]) -> None:
    options = read_options(arguments)
    config = options.config
    num_ranks = config.parallel.ranks
    with ray_cluster(num_ranks):  # RAY_ADDRESS, or a Ray of its own on this machine
        has_gpus = config.trainer.device != "cpu" and ray.cluster_resources().get("GPU", 0) >= num_ranks
        trainer = TorchTrainer(
            one_rank,
            train_loop_config={"options": options, "folder": os.getcwd()},
            scaling_config=ScalingConfig(num_workers=num_ranks, use_gpu=has_gpus),
            run_config=RunConfig(
                storage_path=str(Path(config.trainer.run_dir).resolve()) + "-ray",  # Ray's own records
                failure_config=FailureConfig(max_failures=options.max_restarts),
            ),
        )
        trainer.fit()


if __name__ == "__main__":
    main(sys.argv[1:])
