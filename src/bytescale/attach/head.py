"""Log-probabilities of labels, a few rows at a time, through the head that the model has.

Heads differ: a bias, a scale of the logits (Granite, Cohere), a soft cap (Gemma 2). So the model's own forward computes
the logits of a chunk: its decoder is replaced, for that call, by one that returns the chunk of hidden states.

Shape letters: T rows, n rows of a chunk, C hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bytescale.attach.errors import refusal
from bytescale.common.labels import IGNORE_INDEX
from bytescale.cost.memory import loss_chunk_tokens


def log_probabilities(
    model: nn.Module, inputs: dict[str, Any], labels: Tensor, *, rows_at_a_time: int | None = None
) -> Tensor:
    """``[T]`` log-probability of ``labels [T]``; see ``Micro.logprobs``."""
    hidden, forward_of = _hidden_states(model, inputs)
    hidden = hidden[0, : len(labels)]
    head: Any = causal_model(model).get_output_embeddings()
    words = len(head.weight) if hasattr(head, "weight") else 2**15
    chunk_rows = rows_at_a_time or loss_chunk_tokens(words, hidden.device.type)
    parts = []
    for rows, targets in zip(hidden.split(chunk_rows), labels.split(chunk_rows), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, forward_of, rows, targets, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_chunk(forward_of, rows, targets))
    return torch.cat(parts)


def last_logits(model: nn.Module, inputs: dict[str, Any], rows: Tensor) -> Tensor:
    """``[n, V]`` logits of the given rows ``[n]`` of a micro-batch, in fp32 or wider. Other rows get no logits."""
    hidden, forward_of = _hidden_states(model, inputs)
    if not len(rows):
        return hidden.new_zeros(0, 0)
    logits = forward_of(hidden[0, rows.to(hidden.device)])
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _chunk(head: _Head, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = head(hidden)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(wide, labels, reduction="none", ignore_index=IGNORE_INDEX)


@dataclass(frozen=True)
class _Head:
    """From hidden states ``[n, C]`` to logits ``[n, V]``: the model with its decoder replaced."""

    model: nn.Module
    decoder: nn.Module
    output: Any
    """What the decoder returned; its hidden states are exchanged."""

    def __call__(self, hidden: Tensor) -> Tensor:
        if isinstance(self.output, tuple):
            output = (hidden[None], *self.output[1:])
        else:
            output = replace(self.output, last_hidden_state=hidden[None])
        with _returning(self.decoder, output):
            position = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            result = self.model(input_ids=position, position_ids=position, use_cache=False)
        logits: Tensor = result[0] if isinstance(result, tuple) else result.logits
        return logits[0]


def _hidden_states(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, _Head]:
    """Run the model and keep what its decoder returns ``[1, T, C]``. Its head sees a single row, where it can."""
    decoder = _decoder(model)
    kept: list[Any] = []
    hook = decoder.register_forward_hook(lambda module, args, output: kept.append(output))
    least: dict[str, Any] = {}
    causal = causal_model(model)
    if "logits_to_keep" in inspect.signature(causal.forward).parameters:
        least["logits_to_keep"] = 1
    try:
        model(**inputs, **least)
    finally:
        hook.remove()
    output = kept[0]
    if not isinstance(output, tuple) and not is_dataclass(output):
        raise refusal(
            type(decoder).__name__,
            f"it returns a {type(output).__name__}",
            so="its hidden states are not known",
            fix="compute the loss from model(**micro.inputs).logits",
        )
    hidden: Tensor = output[0]  # type: ignore[index]
    return hidden, _Head(model, decoder, output)


def _decoder(model: nn.Module) -> nn.Module:
    """The part of the model that returns hidden states."""
    root = causal_model(model)
    decoder = root.get_decoder() if hasattr(root, "get_decoder") else None
    if not isinstance(decoder, nn.Module) or decoder is root:
        raise refusal(
            type(root).__name__,
            "it has no decoder below its head (get_decoder())",
            so="its logits could not be computed a few rows at a time",
            fix="compute the loss from model(**micro.inputs).logits",
        )
    return decoder


def causal_model(model: Any) -> Any:
    """The model of transformers inside a module of peft."""
    while hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model


@contextmanager
def _returning(module: nn.Module, output: Any) -> Iterator[None]:
    """Replace a module's forward by a function that returns ``output``."""
    before = module.__dict__.get("forward")
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.forward = before
