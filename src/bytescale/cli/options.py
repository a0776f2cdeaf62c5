"""How all commands read options: from a TOML file, then from ``--section.key value``, which override the file."""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import math
import re
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from bytescale.common.errors import ConfigError, typed_path
from bytescale.common.limits import check_limits, limits
from bytescale.common.parsing import parse_json
from bytescale.common.units import parse_count
from bytescale.config.hugging_face import read_hf_config
from bytescale.config.load import load_config, nearest
from bytescale.config.removed import is_gone
from bytescale.config.resolve import HF_PREFIX
from bytescale.config.schema import Config, CorpusConfig, ModelConfig, ParallelConfig, TrainerConfig
from bytescale.storage.hub import local_folder

Options = TypeVar("Options")
Settings = Annotated[Config, tyro.conf.FlagConversionOff, tyro.conf.arg(name="")]
"""The field ``config`` of a command that takes every setting of a config file, as ``--section.key value``."""
USUAL = (
    "model.preset", "data.sources", "data.tokenizer", "data.context-length", "data.batch-tokens", "parallel.ranks",
    "parallel.tp", "parallel.pp", "parallel.capacity-tokens", "memory.offload", "memory.device-gib", "planner.name",
    "cost.profile", "optimizer.name", "optimizer.lr", "optimizer.schedule", "optimizer.warmup-steps", "trainer.steps",
    "trainer.run-dir", "checkpoint.every", "eval.sources",
)  # fmt: skip
"""The settings that ``--help`` shows; ``--help-all`` shows all."""
_OTHER_WORDS = {
    "batch.tokens": "data.batch-tokens",
    "planner": "planner.name",
    "num-gpus": "parallel.ranks",
    "learning-rate": "optimizer.lr",
    "lr-scheduler-type": "optimizer.schedule",
    "max-steps": "trainer.steps",
    "num-train-epochs": "trainer.epochs",
    "seq-length": "data.context-length",
    "max-length": "data.context-length",
    "global-batch-size": "data.batch-tokens",
    "micro-batch-size": "parallel.capacity-tokens",
}
"""What other frameworks call a setting, and its name here."""
_ALIKE = 0.7
"""From this likeness of two names (0 to 1) on, one may be meant by the other."""


def parse(options: type[Options], arguments: Sequence[str], *, prog: str, default: Options | None = None) -> Options:
    """Read options from the command line. Whole numbers may be written as 8K or 2M. Exits with 2 on values that are no
    values of an option, and with 0 after ``--help``.

    Raises ``ConfigError`` for a number outside of its limits, and for an option that does not exist.
    """
    _check_names(arguments, options)
    registry = ConstructorRegistry()
    registry.primitive_rule(_rule(int, "INT", _count))
    registry.primitive_rule(_rule(float, "FLOAT", _finite))
    registry.primitive_rule(lambda info: _TABLE if info.type == dict[str, Any] else None)
    extra: dict[str, Any] = {} if default is None else {"default": default}
    with registry:
        parsed: Any = tyro.cli(
            options,
            args=list(arguments),
            prog=prog,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands),
            **extra,
        )
    if hasattr(parsed, "config"):
        check_limits(parsed.config)
    check_limits(replace(parsed, config=None) if hasattr(parsed, "config") else parsed, "--")
    return _with_models_here(parsed)


def read(options: type[Options], arguments: Sequence[str], *, prog: str, default: Config) -> Options:
    """Read the options of a command of the form ``prog [CONFIG.toml] [options]``.

    ``default``: the settings without a config file. Raises as ``parse`` and ``load_config``.
    """
    path, rest = leading_path(arguments)
    if not {"-h", "--help"}.isdisjoint(rest):
        print(_short_help(options, prog, default))
        raise SystemExit(0)
    if "--help-all" in rest:
        path, rest = None, ["--help"]
    config = load_config(path) if path else default
    return parse(options, rest, prog=prog, default=typing.cast(Any, options)(config=config))


@dataclass(kw_only=True)
class ModelOptions:
    """The options of a command that runs the model of a folder on the ranks of this machine."""

    ranks: int = field(default=1, metadata=limits(least=1))
    """Processes on this node. Under torchrun, those that are there are joined."""
    capacity_tokens: int = field(default=8192, metadata=limits(least=1))
    """Tokens that one rank holds at once. Longer documents are shared by several ranks."""
    dtype: Literal["auto", "bf16", "fp32", "fp64"] = "auto"
    """Weights and activations; auto: bf16 on GPU, fp32 on CPU."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: cuda where there is a GPU for every rank of this node."""
    model: str = ""
    """The folder of the model, or its name on the Hub (OWNER/NAME); it may also be given as the first argument."""

    def run_config(self, timeout_seconds: float | None) -> Config:
        parallel = ParallelConfig(
            ranks=self.ranks, capacity_tokens=self.capacity_tokens, timeout_seconds=timeout_seconds
        )
        return Config(parallel=parallel, trainer=TrainerConfig(dtype=self.dtype, device=self.device))


def parse_with_model(options: type[Options], arguments: Sequence[str], *, prog: str) -> Options:
    """``parse`` for a command of the form ``prog MODEL [options]``."""
    given = list(arguments)
    if given and not given[0].startswith("-"):
        given = ["--model", *given]
    return parse(options, given, prog=prog)


def folder_of_model(named: str) -> str:
    """The folder of a model that a command runs. Raises ``ConfigError`` as ``read_hf_config``, and without a name."""
    if not named:
        raise ConfigError("no model is named", fix="name its folder, or a model of the Hub, before all other arguments")
    folder = local_folder(named)
    read_hf_config(typed_path(folder))
    return folder


def _with_models_here(options: Any) -> Any:
    """The options with every model of the Hub replaced by its folder on this machine; weights only for ``init``.

    Models are named ``hf:OWNER/NAME``, and where a tokenizer is wanted also ``OWNER/NAME``.
    """
    changed = {}
    for spec in fields(options):
        value = getattr(options, spec.name)
        if isinstance(value, Config | CorpusConfig | ModelConfig | TrainerConfig):
            changed[spec.name] = _with_models_here(value)
        elif spec.name in ("preset", "init") and str(value).startswith(HF_PREFIX):
            folder = local_folder(value.removeprefix(HF_PREFIX), weights=spec.name == "init")
            changed[spec.name] = HF_PREFIX + folder
        elif spec.name == "tokenizer" and "/" in value and not value.endswith(".json"):
            changed[spec.name] = local_folder(value.removeprefix(HF_PREFIX), weights=False)
    return replace(options, **changed) if changed else options


def _options_of(kind: Any, prefix: str = "") -> Iterator[tuple[str, type, str, Any]]:
    """All options below a class of options: the name, the class and field that it sets, and the field's type.

    A flag has two, with and without ``--no-``; the field is named beside the one that changes it.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    for spec in fields(kind):
        marks = getattr(hints[spec.name], "__metadata__", ())
        plain = typing.get_args(hints[spec.name])[0] if marks else hints[spec.name]
        name = next((mark.name for mark in marks if getattr(mark, "name", None) is not None), spec.name)
        if is_dataclass(plain):
            yield from _options_of(plain, f"{prefix}{name}." if name else prefix)
        elif tyro.conf.Positional not in marks:
            name = name.replace("_", "-")
            off = plain is bool and spec.default is True  # a flag that switches something off
            yield f"--{prefix}{name}", kind, "" if off else spec.name, plain
            if plain is bool:
                yield f"--{prefix}no-{name}", kind, spec.name if off else "", plain


def _check_names(arguments: Sequence[str], options: type) -> None:
    known = {name: kind for name, _, _, kind in _options_of(options)}
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, given, value = argument.partition("=")
        name = name.replace("_", "-")
        if name.startswith("--") and name not in (*known, "--", "--help") and not name.startswith("--tyro"):
            is_gone(name.lstrip("-").replace("-", "_"), name)
            fix = _similar_option(name, list(known))
            raise ConfigError(f"unknown option {name}", so="the setting would have no effect", fix=fix)
        choices = typing.get_args(known[name]) if typing.get_origin(known.get(name)) is typing.Literal else ()
        if choices and (value if given else following) not in choices:
            wrong = value if given else following
            raise ConfigError(f"{name} {wrong} is not one of {', '.join(choices)}", fix=nearest(wrong, choices))


def _short_help(kind: Any, prog: str, default: Config) -> str:
    lines = [f"usage: {prog} [CONFIG.toml] [options]", "", inspect.cleandoc(kind.__doc__), "", "options:"]
    texts = {name: attribute_texts(owner)[field] for name, owner, field, _ in _options_of(kind) if field}
    settings = {name for name, *_ in _options_of(Config)}
    lines += [_help_line(name, text) for name, text in texts.items() if name not in settings]
    lines += ["", f"usual settings (`{prog} --help-all` shows all of them):"]
    for name in USUAL:
        section, _, key = name.replace("-", "_").partition(".")
        value = getattr(getattr(default, section), key)
        first = re.split(r"\. (?=[A-Z])", texts[f"--{name}"])[0].removesuffix(".")
        shown = "unset" if value in (None, "", ()) else value
        lines.append(_help_line(f"--{name}", f"{first}. Default: {shown}"))
    return "\n".join(lines)


@cache
def attribute_texts(kind: type) -> dict[str, str]:
    """The text below each attribute of a dataclass and of those that it extends."""
    texts = {
        name: text for base in kind.__bases__ if is_dataclass(base) for name, text in attribute_texts(base).items()
    }
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]).body
    for attribute, text in pairwise(body):
        if isinstance(attribute, ast.AnnAssign) and isinstance(text, ast.Expr):
            name, value = typing.cast(ast.Name, attribute.target), typing.cast(ast.Constant, text.value)
            texts[name.id] = " ".join(str(value.value).split())
    return texts


def _help_line(name: str, text: str) -> str:
    return textwrap.fill(text, 110, initial_indent=f"  {name:<36} ", subsequent_indent=" " * 39)


def _similar_option(name: str, known: Sequence[str]) -> str:
    """A hint with the option whose key (``lr`` of ``optimizer.lr``) or whole name is most like this one."""

    def likeness(option: str) -> tuple[float, float]:
        asked, offered = name.lstrip("-"), option.lstrip("-")
        whole = difflib.SequenceMatcher(None, asked, offered).ratio()
        key = difflib.SequenceMatcher(None, asked.rpartition(".")[2], offered.rpartition(".")[2]).ratio()
        return max(whole, key), whole

    plain = name.lstrip("-")
    other = _OTHER_WORDS.get(plain) or _OTHER_WORDS.get(plain.rpartition(".")[2])
    if f"--{other}" in known:
        return f"write --{other}"
    closest = max(known, key=likeness, default=name)
    if closest == name or likeness(closest)[0] < _ALIKE:
        return "--help lists the options"
    return f"did you mean {closest}?"


def leading_path(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split off the config's path, which comes before all options. Returns it, or None, and the other arguments."""
    if arguments and not arguments[0].startswith("-"):
        return Path(arguments[0]), list(arguments[1:])
    return None, list(arguments)


def _rule(kind: type, metavar: str, from_text: Callable[[str], object]) -> Callable[[PrimitiveTypeInfo], Any]:
    """A rule for tyro that reads options of one type by ``from_text``. None leaves other types to tyro's own rules."""
    spec = PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda texts: from_text(texts[0]),
        is_instance=lambda value: isinstance(value, kind | int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )
    return lambda info: spec if info.type is kind else None


def _table(texts: list[str]) -> dict[str, Any]:
    """``NAME=VALUE``, with a value of JSON, or one that stands for itself as text."""
    found: dict[str, Any] = {}
    for text in texts:
        name, is_pair, value = text.partition("=")
        if not is_pair:
            raise ValueError(f"{text} is not NAME=VALUE")
        with suppress(ValueError):
            value = parse_json(value)
        found[name] = value
    json.dumps(found, allow_nan=False)  # raises ``ValueError``
    return found


_TABLE: PrimitiveConstructorSpec[dict[str, Any]] = PrimitiveConstructorSpec(
    nargs="*",
    metavar="[NAME=VALUE ...]",
    instance_from_str=_table,
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [f"{name}={json.dumps(own)}" for name, own in value.items()],
)


def _count(text: str) -> int:
    if text == "auto":
        return 0  # used by parallel.capacity_tokens; all other counts have to be above 0
    try:
        return parse_count(int(text)) if text.lstrip("-").isdigit() else parse_count(text)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _finite(text: str) -> float:
    """Infinity and NaN are refused: no setting means them."""
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is not a finite number")
    return float(text)
