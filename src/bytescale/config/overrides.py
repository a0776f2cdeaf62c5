"""Options of the optimizer, and of single parameters: ``optimizer.overrides`` has ``PATTERN: NAME=NUMBER, ...``."""

from __future__ import annotations

import math
from typing import Any

from bytescale.common.errors import ConfigError
from bytescale.config.schema import OptimizerConfig

_OPTIONS = ("lr_ratio", "weight_decay")
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
        if len(numbers) != len(like) or not all(isinstance(one, int | float) and 0 <= one < 1 for one in numbers):
            told = ", ".join(f"{own} = {usual}" for own, usual in known.items())
            raise ConfigError(
                f"optimizer.options has {name} = {value!r}, which {config.name} does not know",
                so="the update would be another one",
                fix=f"use numbers from 0 on and below 1 for what it has, with these defaults: {told}",
            )
    if not {**known, **config.options}.get("eps", 1.0) > 0:
        raise ConfigError("optimizer.options has eps = 0", so="an update may divide by 0", fix="use 1e-8 or so")
    return {**known, **config.options}


def parse_override(text: str) -> tuple[str, dict[str, float]]:
    """The pattern of parameters' names, and numbers by option. Raises ``ConfigError`` for anything else."""
    pattern, _, rest = text.partition(":")
    numbers: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in _OPTIONS or not 0 <= number < math.inf:
            raise ConfigError(
                f"optimizer.overrides has {text!r}, and {part!r} in it cannot be read",
                so="the option would have no effect",
                fix='write such as "*.embed_tokens.*: lr_ratio=0.1, weight_decay=0"; these are all options',
            )
        numbers[name] = number
    if not pattern.strip() or not numbers:
        raise ConfigError(
            f"optimizer.overrides has {text!r}, which has no {'option' if pattern.strip() else 'pattern'}",
            fix='write such as "*.embed_tokens.*: lr_ratio=0.1, weight_decay=0"',
        )
    return pattern.strip(), numbers
