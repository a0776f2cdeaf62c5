"""Writes the reference pages of settings and commands from the code, while mkdocs builds the site (see mkdocs.yml).

Nothing of these pages is written by hand: names, types, defaults and texts are those of the settings' schema
(``bytescale.config.schema``) and of the option classes that the commands parse.
"""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from bytescale.cli.main import COMMANDS
from bytescale.cli.options import attribute_texts
from bytescale.common.units import format_count
from bytescale.config.presets import PRESETS
from bytescale.config.schema import Config

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

OPTIONS: dict[str, type] = {
    name: getattr(importlib.import_module(f"bytescale.cli.{module}"), options)
    for name, (module, options, _) in COMMANDS.items()
}
"""The class that each command's arguments are parsed into."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """mkdocs' hook: add the generated pages."""
    from mkdocs.structure.files import File

    for name, text in (("settings", settings_page()), ("commands", commands_page())):
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def settings_page() -> str:
    """Every setting, a table per section of the TOML file, and the numbers of the presets."""
    lines = [
        "# Settings",
        "",
        "A config is a TOML file. It has the sections below, and every setting in it may be left out. On the command",
        "line the same setting is written `--section.name value`, with hyphens: `--data.batch-tokens 64K`. Counts may",
        "be written as `8K` or `2M`, where K is 1024. `bytescale init` writes a commented file to start from.",
        "",
        "This page is generated from `src/bytescale/config/schema.py`.",
    ]
    hints = typing.get_type_hints(Config)
    for section in fields(Config):
        kind = hints[section.name]
        lines += ["", f"## [{section.name}]", "", _summary(kind), "", *_table(kind, section.name + ".", toml=True)]
    lines += ["", "## Presets of models", "", *_presets()]
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """Every command with its options."""
    lines = [
        "# Commands",
        "",
        "`bytescale COMMAND --help` prints the same in a terminal. This page is generated from the commands' own",
        "parsers.",
    ]
    for name, kind in OPTIONS.items():
        lines += ["", f"## bytescale {name}", "", _summary(kind), "", *_table(kind, "", toml=False)]
    return "\n".join(lines) + "\n"


def _table(kind: type, prefix: str, *, toml: bool) -> list[str]:
    rows = [f"| {'setting' if toml else 'option'} | value | default | meaning |", "|---|---|---|---|"]
    for name, hint, spec, text in _options(kind, prefix):
        default = _default(spec, toml=toml)
        if not toml and _plain(hint) is bool:  # a flag, which takes no value
            rows.append(f"| {_flag(name, hint, spec)} | flag |  | {_cell(text)} |")
            continue
        shown = _setting(name) if toml else _flag(name, hint, spec)
        rows.append("| " + " | ".join((shown, _type(hint, spec), default, _cell(text))) + " |")
    if "config" in {spec.name for spec in fields(kind)}:
        rows.append("| `--section.name` |  | the config's | any setting: see [Settings](settings.md) |")
    return rows


def _options(kind: type, prefix: str) -> Iterator[tuple[str, Any, Field[Any], str]]:
    """Name, type, field and text of every option below ``kind``, those of nested classes after a dot."""
    hints, texts = typing.get_type_hints(kind, include_extras=True), attribute_texts(kind)
    for spec in fields(kind):
        hint = hints[spec.name]
        plain = _plain(hint)
        if plain is Config:
            continue  # their settings have a page
        if is_dataclass(plain):
            yield from _options(typing.cast(type, plain), f"{prefix}{spec.name}.")
        else:
            yield prefix + spec.name, hint, spec, texts[spec.name]


def _setting(name: str) -> str:
    return f"`{name.partition('.')[2]}`"


def _flag(name: str, hint: Any, spec: Field[Any]) -> str:
    if tyro.conf.Positional in getattr(hint, "__metadata__", ()):
        return f"`{spec.name.upper()}`"
    if _plain(hint) is bool and spec.default is True:  # the flag switches it off
        section, dot, name = name.rpartition(".")
        name = f"{section}{dot}no-{name}"
    return f"`--{name.replace('_', '-')}`"


def _plain(hint: Any) -> Any:
    """The type without its ``Annotated``."""
    return typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint


def _type(hint: Any, spec: Field[Any]) -> str:
    hint = _plain(hint)
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _type(next(option for option in inside if option is not type(None)), spec)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if origin is tuple:
        return f"list of {_type(inside[0], spec)}"
    names = {dict: "table", int: "count", float: "number", str: "text", bool: "`true`, `false`", Path: "path"}
    return names[origin or hint] + "".join(f" or `{word}`" for word in spec.metadata.get("words", {}))


def _default(spec: Field[Any], *, toml: bool) -> str:
    value = spec.default if spec.default_factory is MISSING else spec.default_factory()
    if value is MISSING:
        return "required"
    for word, number in spec.metadata.items():
        value = word if value == number else value
    if value in (None, "", (), {}):
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`" + (str(list(value)) if toml else " ".join(map(str, value))).replace("'", '"') + "`"
    if isinstance(value, float):
        return f"`{value:g}`"
    if isinstance(value, int) and value >= 1024 and value % 1024 == 0:
        return f"`{format_count(value)}`"
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _summary(kind: type) -> str:
    """The class's docstring, its indentation removed."""
    return inspect.cleandoc(kind.__doc__ or "").replace("[", r"\[")


def _presets() -> list[str]:
    shown = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
             "num_local_experts")  # fmt: skip
    rows = [
        "| preset | " + " | ".join(f"`{name}`" for name in shown) + " |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for name, content in PRESETS.items():
        rows.append(f"| `{name}` | " + " | ".join(str(content.get(field, 0)) for field in shown) + " |")
    return rows
