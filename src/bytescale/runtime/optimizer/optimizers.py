"""The optimizers that the trainer knows by name, and options of single parameters by patterns of their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from bytescale.common.errors import ConfigError
from bytescale.config.overrides import optimizer_options
from bytescale.config.schema import OptimizerConfig
from bytescale.runtime.group import RankGroup
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.muon import DealtMatrices, MuonOnShards, is_hidden_matrix

LR_RATIO = "lr_ratio"
"""Option of a group of parameters: its learning rate over that of the others."""
GroupOptions = Callable[[str, nn.Parameter], dict[str, Any]]
"""From a parameter's name and the parameter to options of its own, such as ``{"weight_decay": 0.0}``."""


def named_optimizer(
    config: OptimizerConfig, parameters: Sequence[FlatParameters], group: RankGroup
) -> tuple[type[torch.optim.Optimizer], dict[str, Any], GroupOptions]:
    """The optimizer that ``config`` names: its class, its options, and those of single parameters.

    ``parameters``: what it updates, Muon in one flat buffer. ``group``: the ranks that share its states. Weight decay
    holds for matrices alone, unless ``optimizer.overrides`` says something else. Raises ``ConfigError`` for an override
    that no parameter of any rank has, or that the optimizer does not know.
    """
    options = {"lr": config.lr, "weight_decay": config.weight_decay, **optimizer_options(config)}
    cls: type[torch.optim.Optimizer] = torch.optim.SGD
    if config.name != "sgd":
        cls, options = torch.optim.AdamW, {**options, "fused": True}
    if config.name == "muon":
        cls, options = MuonOnShards, {**options, "matrices": DealtMatrices(parameters[0], group)}
    names = [entry.name for own in parameters for entry in own.entries]
    overrides = _checked_overrides(config, names, group)

    def own_options(name: str, parameter: nn.Parameter) -> dict[str, Any]:
        own: dict[str, Any] = {} if parameter.dim() >= 2 else {"weight_decay": 0.0}
        if config.name == "muon":
            own["muon"] = is_hidden_matrix(name, parameter)
        for pattern, numbers in overrides:
            if fnmatchcase(name, pattern):
                own |= numbers
        return own

    return cls, options, own_options


def _checked_overrides(
    config: OptimizerConfig, names: Sequence[str], group: RankGroup
) -> list[tuple[str, dict[str, float]]]:
    """Patterns with the options of a group of parameters, in the order in which they are applied."""
    found = []
    for pattern, given in config.overrides.items():
        numbers = dict(given)
        matches = any(fnmatchcase(name, pattern) for name in names)
        if not group.max_of([float(matches)])[0]:
            raise ConfigError(
                f"optimizer.overrides has {pattern!r}, which no trained parameter matches",
                so="it would have no effect",
                fix=f"use patterns of names such as {names[0]}; * stands for anything",
            )
        if LR_RATIO in numbers:
            numbers["lr"] = config.lr * numbers[LR_RATIO]
        found.append((pattern, numbers))
    return found
