"""The tables of the optimizer: its own numbers, and options of single parameters."""

from __future__ import annotations

import math
from typing import Any

from bytescale.common.errors import ConfigError
from bytescale.config.schema import OptimizerConfig

_OPTIONS = {"lr_ratio", "weight_decay"}
_ADAMW = {"betas": [0.9, 0.95], "eps": 1e-8}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": _ADAMW,
    "sgd": {"momentum": 0.95},
    "muon": {**_ADAMW, "momentum": 0.95},
}


def optimizer_options(config: OptimizerConfig) -> dict[str, Any]:
    """The numbers of an optimizer by its own names for them: those of ``optimizer.options``, else the usual ones.

    Raises ``ConfigError`` for a name that the optimizer does not have, and for a value that it cannot compute with.
    """
    known = _DEFAULTS[config.name]
    for name, value in config.options.items():
        numbers, like = ([*one] if isinstance(one, list | tuple) else [one] for one in (value, known.get(name, [])))
        fits = len(numbers) == len(like) and all(_is_number(one) and one < 1 for one in numbers)
        if not fits or (name == "eps" and not value):
            told = ", ".join(f"{own} = {usual}" for own, usual in known.items())
            raise ConfigError(
                f"optimizer.options has {name} = {value!r}, which {config.name} cannot compute with",
                so="the update would be another one",
                fix=f"use numbers from 0 on and below 1 for what it has, with these defaults: {told}",
            )
    return {**known, **config.options}


def check_overrides(overrides: dict[str, Any]) -> None:
    """Raise ``ConfigError`` unless every pattern of ``optimizer.overrides`` has options with numbers from 0 on."""
    for pattern, given in overrides.items():
        numbers = given if isinstance(given, dict) else {}
        if not numbers or not numbers.keys() <= _OPTIONS or not all(map(_is_number, numbers.values())):
            raise ConfigError(
                f"optimizer.overrides has {pattern!r} with {given!r}, which cannot be read",
                so="it would have no effect",
                fix='write such as {"*.embed_tokens.*" = {lr_ratio = 0.1, weight_decay = 0}}; these are all options',
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
