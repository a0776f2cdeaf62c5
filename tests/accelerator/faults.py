"""What a simulated accelerator finds wrong, and where the code was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Literal

Kind = Literal["race", "early free", "mix"]


@dataclass(frozen=True)
class Fault:
    """``race``: two operations on the same bytes, one of which writes, in no certain order. ``early free``: memory that
    may be used again while another stream still uses it. ``mix``: tensors of the host and of the device in one
    operation, or a copy that needs page-locked memory and has none."""

    kind: Kind
    what: str
    where: str


@dataclass(frozen=True)
class HostWait:
    """The host has waited for the device. ``during``: the part of the step; empty outside of all parts."""

    what: str
    where: str
    during: str


def place_in_code() -> str:
    """The innermost line on the stack of bytescale, transformers, verl or TRL, else of a test."""
    frames = list(_files_and_lines(sys._getframe(1)))
    for parts, left_out in (
        (("/src/bytescale/", "/transformers/", "/site-packages/verl/", "/site-packages/trl/"), "/parity/"),
        (("/tests/",), "/tests/accelerator/de"),
    ):
        for file, line in frames:
            if left_out not in file:
                for part in parts:
                    if part in file:
                        return f"{file[file.rindex(part) + 1 :]}:{line}"
    return "?"


def _files_and_lines(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
