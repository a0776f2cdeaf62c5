"""Reads and writes numbers as people do. K, M and G are powers of 1024 for tokens and bytes, as in the paper."""

from __future__ import annotations

import re

from bytescale.common.errors import ConfigError

KIBI = 1024
GIBI = 1024**3
MOST_COUNT = 2**53
"""The largest count of anything: up to there, 64-bit integers and floats hold every whole number."""
_FACTORS = {"": 1, "K": KIBI, "M": KIBI**2, "G": KIBI**3, "T": KIBI**4}


def parse_count(text: str | int) -> int:
    """``"8K"`` -> 8192, ``"2M"`` -> 2097152, ``4096`` -> 4096. Raises ``ConfigError`` on anything else."""
    if isinstance(text, int):
        return _checked(text)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text.strip().upper().replace("IB", "B"))
    if match is None:
        raise ConfigError(f"{text!r} is not a count", fix="write a whole number, or one with K, M or G such as 256K")
    value = float(match.group(1)) * _FACTORS[match.group(2)]
    if value != int(value):
        raise ConfigError(f"{text!r} is {value} tokens, not a whole number", fix="use a whole number")
    return _checked(int(value))


def _checked(count: int) -> int:
    if abs(count) > MOST_COUNT:
        raise ConfigError(f"{count} is larger than any count", fix=f"use at most {MOST_COUNT}")
    return count


def format_count(value: float) -> str:
    """8192 -> ``"8K"``, 12500 -> ``"12.2K"``, 700 -> ``"700"``: at most three significant digits above 1024."""
    return _format(value, KIBI, ["", "K", "M", "G", "T"])


def format_bytes(value: float) -> str:
    """1536 -> ``"1.5 KiB"``."""
    return _format(value, KIBI, [" B", " KiB", " MiB", " GiB", " TiB"])


def format_si(value: float) -> str:
    """1.25e12 -> ``"1.25T"`` in powers of 1000 (FLOPs, parameters)."""
    return _format(value, 1000, ["", "K", "M", "G", "T", "P", "E"])


def format_seconds(value: float) -> str:
    """0.0123 -> ``"12.3 ms"``, 75 -> ``"1m15s"``."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 60:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def _format(value: float, base: int, suffixes: list[str]) -> str:
    magnitude = 0
    scaled = float(value)
    while abs(scaled) >= base and magnitude < len(suffixes) - 1:
        scaled /= base
        magnitude += 1
    number = f"{scaled:.0f}" if magnitude == 0 and float(value).is_integer() else f"{scaled:.3g}"
    if abs(scaled) >= 1000:
        number = f"{scaled:.0f}"
    return number + suffixes[magnitude]
