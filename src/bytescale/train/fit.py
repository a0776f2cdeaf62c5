"""Fits a config to the machine that it runs on: its GPUs, and how many processes have room in its memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from bytescale.common.errors import ConfigError
from bytescale.common.units import format_bytes
from bytescale.config import Config
from bytescale.train.parts.budget import machine_bytes

_PROCESS_BYTES = 340e6
"""What a rank has in memory before its first tensor: Python, PyTorch and their libraries (measured, torch 2.13)."""


def fit_to_gpus(config: Config, num_gpus: int | None = None) -> Config:
    """Use one rank per GPU, with the same total capacity, if the machine has fewer GPUs than the config has ranks.

    So a config written for 4 CPU ranks of 2K tokens runs on one GPU as one rank of 8K. This applies only with
    ``trainer.device = "auto"``. The change is printed. ``num_gpus`` None: the GPUs are counted.
    """
    if num_gpus is None:
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks, capacity = config.parallel.ranks, config.parallel.capacity_tokens
    if config.trainer.device != "auto" or not 0 < num_gpus < ranks:
        return config
    fitted = replace(config.parallel, ranks=num_gpus, capacity_tokens=-(-ranks * capacity // num_gpus))
    print(
        f"{num_gpus} GPUs for {ranks} ranks: running {num_gpus} ranks of {fitted.capacity_tokens} tokens instead "
        '(trainer.device = "cpu" keeps them on the CPU)'
    )
    return replace(config, parallel=fitted)


def check_room(num_ranks: int) -> None:
    """Raise ``ConfigError`` if so many processes do not even have room on this machine before they hold any tensor."""
    needed, there = num_ranks * _PROCESS_BYTES, machine_bytes()
    if needed > there:
        raise ConfigError(
            f"{num_ranks} ranks on this machine need {format_bytes(needed)} for their processes alone, and it has "
            f"{format_bytes(there)}",
            so="the system would kill some of them",
            fix=f"use at most {int(there / _PROCESS_BYTES)} ranks, or several machines (torchrun, --launch ray)",
        )
