"""TOML to ``Config`` and back, with the nearest name for a misspelt key."""

from __future__ import annotations

import difflib
import json
import math
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from bytescale.common.errors import ConfigError
from bytescale.common.parsing import MOST_SETTINGS, parse_toml, read_text
from bytescale.common.units import parse_count
from bytescale.config.removed import is_gone
from bytescale.config.schema import Config

Section = TypeVar("Section")
DEMO_CONFIG = Path(__file__).with_name("demo.toml")
"""The commented config that `bytescale demo` runs and `bytescale init` writes."""


def load_config(path: Path) -> Config:
    """Read a TOML file. Relative paths inside it stay relative to the working directory, as on the command line."""
    try:
        content = parse_toml(read_text(path, MOST_SETTINGS))
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no config file {path}",
            so="there are no settings to use",
            fix="name a TOML file; `bytescale init` writes one",
        ) from error
    except (ValueError, IsADirectoryError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", fix="mend the line that it names") from error
    return from_dict(Config, content, str(path))


def config_to_toml(config: Any, prefix: str = "") -> str:
    """A dataclass as TOML, unset and infinite values left out: a run can be repeated from its config."""
    lines, sections = list[str](), list[str]()
    for spec in fields(config):
        value = getattr(config, spec.name)
        if is_dataclass(value):
            sections += [f"[{prefix}{spec.name}]", config_to_toml(value, f"{prefix}{spec.name}.")]
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            for item in value:
                sections += [f"[[{prefix}{spec.name}]]", config_to_toml(item, f"{prefix}{spec.name}.")]
        elif not (value is None or (isinstance(value, float) and math.isinf(value))):
            lines.append(f"{spec.name} = {_toml_value(value)}\n")
    return "".join(lines) + "\n" * bool(lines and sections) + "\n".join(sections)


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """A hint ``did you mean ...?`` or the list of what exists."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else "known: " + ", ".join(known)


def from_dict(kind: type[Section], content: dict[str, Any], where: str, prefix: str = "") -> Section:
    """A dataclass from nested dictionaries. ``where``: the file, for messages.

    Raises ``ConfigError`` on unknown keys, on values of the wrong type, and for fields that have no value.
    """
    specs = {spec.name: spec for spec in fields(typing.cast(Any, kind))}
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in content.items():
        if is_gone(prefix + name, f"{where}: {prefix}{name}", value):
            continue
        if name not in specs:
            what = "section" if not prefix and isinstance(value, dict) else "key"
            others = typing.get_type_hints(Config).items() if prefix else ()
            moved = [own for own, section in others if name in section.__dataclass_fields__]
            raise ConfigError(
                f"{where}: unknown {what} {prefix}{name}",
                so="the setting would have no effect",
                fix=f"did you mean {moved[0]}.{name}?" if moved else nearest(name, specs),
            )
        if isinstance(value, str):
            value = specs[name].metadata.get("words", {}).get(value, value)
        values[name] = _value(hints[name], value, where, prefix + name)
    for name, spec in specs.items():
        if name not in values and spec.default is spec.default_factory is MISSING:
            raise ConfigError(f"{where} lacks {prefix}{name}", fix="write it down, or make the file again")
    return kind(**values)


def _value(hint: Any, value: Any, where: str, name: str) -> Any:
    """Check one value against its type; counts such as "8K" become integers."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _value(next(option for option in options if option is not type(None)), value, where, name)
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {name} = {value!r} is not a section", fix=f"write [{name}]")
        return from_dict(typing.cast(Any, hint), value, where, prefix=f"{name}.")
    if origin is typing.Literal:
        if value not in options:
            hint_text = nearest(value, options) if isinstance(value, str) else "known: " + ", ".join(options)
            raise ConfigError(f"{where}: {name} = {value!r} is not one of {', '.join(options)}", fix=hint_text)
        return value
    if origin is dict:
        if not isinstance(value, dict) and value not in ([], ""):  # as older runs wrote what is a table now
            raise ConfigError(f"{where}: {name} = {value!r} is not a table", fix=f"write [{name}], or {{name = value}}")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:  # a date, or no number
            raise ConfigError(f"{where}: {name} holds what JSON cannot ({error})", fix="mend its values") from error
        return dict(value)
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise ConfigError(f"{where}: {name} = {value!r} is not a list", fix='write ["a", "b"]')
        kinds = options[:1] * len(items) if options[-1] is ... else options
        if len(kinds) != len(items):
            raise ConfigError(f"{where}: {name} = {value!r} has not {len(kinds)} entries", fix="mend the list")
        return tuple(_value(kind, item, where, name) for kind, item in zip(kinds, items, strict=True))
    if hint is int and isinstance(value, str | int) and not isinstance(value, bool):
        try:
            return parse_count(value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {name}: {error}") from error
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {name} is {value}", fix="use a finite number")
    if type(value) is not hint:
        raise ConfigError(f"{where}: {name} = {value!r} is not {_TYPE_NAMES[hint]}", fix="mend its type")
    return value


_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has the escapes of JSON
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
    return repr(value)
