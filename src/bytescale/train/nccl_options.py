"""NCCL's settings in the environment: those that cannot be right are refused before the ranks connect.

NCCL itself follows one of two contradicting variables, or none, without a word.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from bytescale.common.errors import ConfigError
from bytescale.runtime import RankGroup

_LIMITS = (
    ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
    ("NCCL_MIN_P2P_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS"),
    ("NCCL_NCHANNELS_PER_NET_PEER", "NCCL_MAX_P2P_NCHANNELS"),
)
"""Pairs of which the first may not exceed the second."""
_NUMBERS = (*dict.fromkeys(name for pair in _LIMITS for name in pair), "NCCL_BUFFSIZE")
_NO_P2P_LEVELS = ("LOC", "0")


def check_nccl_options(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ``ConfigError`` where NCCL's variables contradict each other, or a number is none."""
    numbers = {name: _number(name, environment[name]) for name in _NUMBERS if name in environment}
    for low, high in _LIMITS:
        if low in numbers and high in numbers and numbers[low] > numbers[high]:
            raise ConfigError(
                f"{low} = {numbers[low]} exceeds {high} = {numbers[high]}",
                so="NCCL would follow one of them silently, and rings would not have the channels that were meant",
                fix="unset one of the two in the environment of every rank",
            )
    level = environment.get("NCCL_P2P_LEVEL")
    if environment.get("NCCL_P2P_DISABLE") == "1" and level is not None and level.upper() not in _NO_P2P_LEVELS:
        raise ConfigError(
            f"NCCL_P2P_DISABLE = 1 forbids what NCCL_P2P_LEVEL = {level} asks for",
            so="GPUs of one node would talk through host memory although NVLink or PCIe was asked for",
            fix="unset NCCL_P2P_DISABLE, or NCCL_P2P_LEVEL if direct access does not work on this machine",
        )


def check_same_nccl_options(world: RankGroup, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ``ConfigError`` on every rank where ranks have different numbers: both ends of a channel must agree."""
    own = [float(_number(name, environment[name])) if name in environment else -1.0 for name in _NUMBERS]
    largest, negated = world.max_of(own), world.max_of([-number for number in own])
    for name, high, low in zip(_NUMBERS, largest, negated, strict=True):
        if high != -low:
            values = " and ".join("unset" if number < 0 else f"{number:.0f}" for number in (-low, high))
            raise ConfigError(
                f"{name} is {values} on different ranks",
                so="their ends of a connection would not fit together, and messages would hang",
                fix="set it alike on every node, or nowhere",
            )


def _number(name: str, value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        number = -1
    if number < 0:
        raise ConfigError(f"{name} is {value!r}", so="NCCL would ignore it", fix="use a whole number, or unset it")
    return number
