"""Ranges of numbers in dataclasses: written once, in the metadata of a field, and checked by one function."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from math import inf
from typing import Any

from bytescale.common.errors import ConfigError


def limits(*, least: float = -inf, above: float = -inf, most: float = inf, **words: int) -> dict[str, Any]:
    """Return the metadata of a field for a number of at least ``least``, above ``above`` and at most ``most``.

    ``words`` stand for a number, such as ``auto=0``.
    """
    return {"least": least, "above": above, "most": most, "words": words}


def check_limits(section: Any, prefix: str = "") -> None:
    """Raise ``ConfigError`` for the first number of a dataclass, or of those inside of it, outside of its limits.

    Fields that are None are unset. ``prefix`` comes before the name of a field in the message.
    """
    for spec in fields(section):
        value, given = getattr(section, spec.name), spec.metadata
        if is_dataclass(value):
            check_limits(value, f"{prefix}{spec.name}.")
        elif isinstance(value, tuple):
            for item in filter(is_dataclass, value):
                check_limits(item, f"{prefix}{spec.name}.")
        elif value is not None and "least" in given:
            if given["least"] <= value <= given["most"] and value > given["above"]:
                continue
            kind = "a whole number" if isinstance(value, int) else "a number"
            lower = f"above {given['above']:g}" if given["above"] > -inf else f"of at least {given['least']:g}"
            upper = f" and at most {given['most']:g}" if given["most"] < inf else ""
            raise ConfigError(f"{prefix}{spec.name} is {value}", fix=f"use {kind} {lower}{upper}")
