"""Compiles chat templates, which come with strangers' models, so that they can neither reach anything nor run for ever.

jinja2's sandbox keeps a template from attributes, files and code. It does not keep it from work without end, such as
three loops of 100,000 rounds inside each other, or a number with ten billion digits. Here such work ends with an error.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from bytescale.data.tokens.chat import START, STOP

MOST_ROUNDS = 10_000_000  # of all loops of one conversation together: some seconds
MOST_BITS = 10**6  # of a power
MOST_ITEMS = 10**8  # of a repeated text or list


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    """Compile a template as transformers does, with ``START`` and ``STOP`` around the blocks of ``{% generation %}``.

    ``render`` takes one variable more: ``_rounds``, a list with the number of rounds that its loops have run, ``[0]``.

    Raises ``jinja2.TemplateError``; so does ``render`` where the template works too long.
    """
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters |= {"tojson": _to_json, "_counted": _counted}
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Every loop of the template counts its rounds."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        both = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and both and left.bit_length() * right > MOST_BITS:
            raise SecurityError(f"a power of more than {MOST_BITS:,} bits")
        if operator == "*" and not both:
            for items, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(items, "__len__") and len(items) * times > MOST_ITEMS:
                    raise SecurityError(f"a repetition of more than {MOST_ITEMS:,} characters or items")
        return super().call_binop(context, operator, left, right)


class _Rounds:
    """The values of a loop, with its length where it has one."""

    def __init__(self, values: Iterable[Any], counter: list[int]) -> None:
        self._values, self._counter = values, counter

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # a TypeError, as jinja2 expects, where there is none

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._counter[0] += 1
            if self._counter[0] > MOST_ROUNDS:
                raise SecurityError(f"its loops run more than {MOST_ROUNDS:,} rounds")
            yield value


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, values: Iterable[Any]) -> _Rounds:
    return _Rounds(values, context["_rounds"])


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{START}{caller()}{STOP}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
