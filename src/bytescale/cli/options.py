"""What the commands' option parsers share: a TOML file first, then ``--section.key value`` over it, both checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from bytescale.common.errors import ConfigError
from bytescale.common.units import parse_count

Options = TypeVar("Options")


def parse(options: type[Options], arguments: Sequence[str], *, prog: str, default: Options | None = None) -> Options:
    """Options from the command line; whole numbers may be written as 8K or 2M. Exits with 2 on unknown options."""
    registry = ConstructorRegistry()
    registry.primitive_rule(_count_rule)
    extra: dict[str, Any] = {} if default is None else {"default": default}
    with registry:
        return tyro.cli(
            options,
            args=list(arguments),
            prog=prog,
            config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
            **extra,
        )


def leading_path(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The config file, which comes before all options, and the rest."""
    if arguments and not arguments[0].startswith("-"):
        return Path(arguments[0]), list(arguments[1:])
    return None, list(arguments)


def _count_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """``int`` options through ``parse_count``; None lets tyro's own rules go on."""
    if info.type is not int:
        return None

    def from_text(texts: list[str]) -> int:
        try:
            return parse_count(int(texts[0])) if texts[0].lstrip("-").isdigit() else parse_count(texts[0])
        except ConfigError as error:
            raise ValueError(str(error)) from error

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=from_text,
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )
