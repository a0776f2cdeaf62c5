"""How all commands read options: from a TOML file, then from ``--section.key value``, which override the file."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from bytescale.common.errors import ConfigError
from bytescale.common.limits import check_limits
from bytescale.common.units import parse_count
from bytescale.config import HF_PREFIX, Config, ModelConfig, TrainerConfig
from bytescale.config.load import RENAMED
from bytescale.storage.hub import local_folder

Options = TypeVar("Options")
_OTHER_WORDS = {
    "cp": "planner.static-cp",
    "context-parallel-size": "planner.static-cp",
    "learning-rate": "optimizer.lr",
    "lr-scheduler-type": "optimizer.schedule",
    "max-steps": "trainer.steps",
    "epochs": "trainer.steps",
    "seq-length": "data.context-length",
    "max-length": "data.context-length",
    "global-batch-size": "data.batch-tokens",
    "micro-batch-size": "parallel.capacity-tokens",
}
"""What other frameworks call a setting, and its name here."""
_ALIKE = 0.7
"""From this likeness of two names (0 to 1) on, one may be meant by the other."""


def parse(options: type[Options], arguments: Sequence[str], *, prog: str, default: Options | None = None) -> Options:
    """Read options from the command line. Whole numbers may be written as 8K or 2M. Exits with 2 on unknown options.

    Raises ``ConfigError`` for a number outside of its limits.
    """
    registry = ConstructorRegistry()
    registry.primitive_rule(_count_rule)
    registry.primitive_rule(_number_rule)
    extra: dict[str, Any] = {} if default is None else {"default": default}
    with registry:
        parsed = tyro.cli(
            options,
            args=list(arguments),
            prog=prog,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands),
            **extra,
        )
    if not isinstance(getattr(parsed, "config", None), Config):  # the settings of a run: ``validate`` checks them
        check_limits(parsed, "--")
    return _with_models_here(parsed)


def _with_models_here(options: Any) -> Any:
    """The options with every ``hf:OWNER/NAME`` replaced by its folder on this machine; weights only for ``init``."""
    changed = {}
    for spec in fields(options):
        value = getattr(options, spec.name)
        if isinstance(value, Config | ModelConfig | TrainerConfig):
            changed[spec.name] = _with_models_here(value)
        elif spec.name in ("preset", "init") and str(value).startswith(HF_PREFIX):
            folder = local_folder(value.removeprefix(HF_PREFIX), weights=spec.name == "init")
            changed[spec.name] = HF_PREFIX + folder
    return replace(options, **changed) if changed else options


def check_setting_names(arguments: Sequence[str], *, also: Sequence[str] = ()) -> None:
    """Raise ``ConfigError`` for a ``--section.key`` that does not exist. The message suggests the most similar name.

    The parser would also refuse the option, but without a suggestion. ``also``: options of the command itself.
    """
    config = Config()
    settings = [
        f"{section.name}.{spec.name}" for section in fields(config) for spec in fields(getattr(config, section.name))
    ]
    known = ["--" + name.replace("_", "-") for name in settings] + list(also)
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in (*known, "--help"):
            fix = RENAMED.get(name.removeprefix("--")) or _similar_option(name, known)
            raise ConfigError(f"unknown option {name}", so="the setting would have no effect", fix=fix)


def _similar_option(name: str, known: Sequence[str]) -> str:
    """A hint with the option whose key (``lr`` of ``optimizer.lr``) or whole name is most like this one."""

    def likeness(option: str) -> tuple[float, float]:
        asked, offered = name.lstrip("-"), option.lstrip("-")
        whole = difflib.SequenceMatcher(None, asked, offered).ratio()
        key = difflib.SequenceMatcher(None, asked.rpartition(".")[2], offered.rpartition(".")[2]).ratio()
        return max(whole, key), whole

    other = _OTHER_WORDS.get(name.lstrip("-").rpartition(".")[2])
    if other is not None:
        return f"write --{other}"
    closest = max(known, key=likeness)
    if likeness(closest)[0] < _ALIKE:
        return "write a setting as --section.key value; --help lists all of them"
    return f"did you mean {closest}?"


def leading_path(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split off the config's path, which comes before all options. Returns it, or None, and the other arguments."""
    if arguments and not arguments[0].startswith("-"):
        return Path(arguments[0]), list(arguments[1:])
    return None, list(arguments)


def _count_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """Read ``int`` options with ``parse_count``. None leaves other types to tyro's own rules."""
    if info.type is not int:
        return None

    def from_text(texts: list[str]) -> int:
        if texts[0] == "auto":
            return 0  # used by parallel.capacity_tokens; all other counts have to be above 0
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


def _number_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[float] | None:
    """Read ``float`` options. Infinity and NaN are refused: no setting means them."""
    if info.type is not float:
        return None

    def from_text(texts: list[str]) -> float:
        number = float(texts[0])
        if not math.isfinite(number):
            raise ValueError(f"{texts[0]} is not a finite number")
        return number

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="FLOAT",
        instance_from_str=from_text,
        is_instance=lambda value: isinstance(value, float | int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )
