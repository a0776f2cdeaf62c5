"""What the schema says of its settings: the text below each field, for help and for the reference pages."""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from dataclasses import is_dataclass
from itertools import pairwise


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
