"""How a model is refused: by the name of the part and of the layer."""

from __future__ import annotations

from bytescale.common.errors import ConfigError


class Refusal(ConfigError):
    """A model, or something that it does, for which a plan would not give the results of one process."""


def refusal(part: str, what: str, *, so: str, fix: str) -> Refusal:
    """``part`` names the module or its layer; the rest is as in ``ConfigError``."""
    return Refusal(f"{part} cannot be attached: {what}", so=so, fix=fix)
