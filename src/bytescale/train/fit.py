"""Fits a config that was written for CPU ranks to the GPUs of the machine that it runs on."""

from __future__ import annotations

from dataclasses import replace

import torch

from bytescale.config import Config


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
