"""JSON and TOML of others. Text that is nested too deeply for Python's parsers is a ``ValueError`` like any other."""

from __future__ import annotations

import json
import tomllib
from typing import Any


def parse_json(text: str | bytes | bytearray) -> Any:
    """``json.loads``. Raises ``ValueError``."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """``tomllib.loads``. Raises ``ValueError``."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
