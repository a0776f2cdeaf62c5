"""Tokens and labels that the model has no word for, found before a GPU stops at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bytescale.common.errors import DataError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.hf.model.head import causal_model


def require_words(fields: Mapping[str, Sequence[Tensor]], model: nn.Module) -> None:
    """Raise ``DataError`` for tokens outside of the model's embedding, and labels outside of its head.

    ``fields``: ``tokens`` and ``labels``, each a list of ``[S]`` numbers.
    """
    for name, module in (("tokens", _module(model, "input")), ("labels", _module(model, "output"))):
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        for number, values in enumerate(fields[name]):
            wrong = (values < 0) | (values >= weight.shape[0])
            if name == "labels":
                wrong &= values != IGNORE_INDEX
            if bool(wrong.any()):
                raise DataError(
                    f"the {name} of document {number} have {int(values[wrong][0])}; the model has "
                    f"{weight.shape[0]} words",
                    so="there is no row of its matrix for it",
                    fix="use the tokenizer that belongs to the model"
                    + (f"; {IGNORE_INDEX} marks a token without a label" if name == "labels" else ""),
                )


def _module(model: Any, kind: str) -> Any:
    getter = getattr(causal_model(model), f"get_{kind}_embeddings", None)
    return None if getter is None else getter()
