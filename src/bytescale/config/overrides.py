"""Options of single parameters, as ``optimizer.overrides`` has them: ``PATTERN: NAME=NUMBER, NAME=NUMBER``."""

from __future__ import annotations

import math

from bytescale.common.errors import ConfigError

_OPTIONS = ("lr_ratio", "weight_decay")


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
